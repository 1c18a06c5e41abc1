# SPDX-License-Identifier: Apache-2.0
"""What all lists can do: choose rows by namespace, order them, and limit them."""

from typing import Annotated, NamedTuple

import typer

from kbpf.views.page import Page

Namespace = Annotated[str, typer.Option("-n", "--namespace", help="Only this namespace.")]
AllNamespaces = Annotated[bool, typer.Option("-A", "--all-namespaces", help="All namespaces, as without -n.")]
NoHeaders = Annotated[bool, typer.Option("--no-headers", help="Leave out the titles of the columns.")]
SortBy = Annotated[str, typer.Option("--sort-by", metavar="COLUMN", help="The column that orders the rows.")]
Limit = Annotated[int, typer.Option("--limit", min=0, metavar="N", help="Show at most N rows; 0: all.")]
NoPager = Annotated[
    bool,
    typer.Option("--no-pager", help="Print long output at once; on a terminal less shows it."),
]


def _refuse_labels(labels: str) -> str:
    if labels:
        raise typer.BadParameter(
            f"the labels of Services are not stored on the node; `kubectl get services -A -l {labels}` lists the names"
        )
    return labels


Labels = Annotated[str, typer.Option("-l", "--selector", hidden=True, callback=_refuse_labels)]


def split_name(name: str, namespace: str) -> tuple[str, str]:
    """Namespace ("" if none is given) and name of NAME or NAMESPACE/NAME. Raises
    typer.BadParameter if -n contradicts it.
    """
    name_namespace, _, bare = name.rpartition("/")
    if name_namespace and namespace not in ("", name_namespace):
        raise typer.BadParameter(f"{namespace} contradicts the namespace of {name}", param_hint="--namespace")
    return name_namespace or namespace, bare


def choose_namespace(name: str, namespace: str, all_namespaces: bool) -> str:
    """The value of -n, "" with -A. Raises typer.BadParameter if it contradicts NAMESPACE/NAME."""
    chosen = "" if all_namespaces else namespace
    split_name(name, chosen)
    return chosen


class Selection(NamedTuple):
    """The rows to show, and their order: the values of the options above."""

    namespace: str = ""
    sort_by: str = ""
    limit: int = 0

    def apply(self, page: Page) -> Page:
        """The page with these rows. Raises typer.BadParameter."""
        namespaces = page.kind.namespaces if self.namespace else None
        keep = (lambda row: self.namespace in namespaces(row)) if namespaces else None
        try:
            page = page.refined(keep, self.sort_by, self.limit)
        except KeyError:
            titles = ", ".join(column.title for column in page.columns)
            raise typer.BadParameter(f"no column {self.sort_by}; there are {titles}", param_hint="--sort-by") from None
        if page.empty and self.namespace:
            return page.with_empty(f"No resources found in {self.namespace} namespace.")
        return page
