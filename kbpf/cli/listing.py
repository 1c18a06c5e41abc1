# SPDX-License-Identifier: Apache-2.0
"""What all lists can do: choose rows by namespace and by field, order them, and limit them."""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from kbpf.cli import completion, jsonpath
from kbpf.cli.options import split_at_commas
from kbpf.views.page import Kind, Page

Namespace = Annotated[
    str,
    typer.Option(
        "-n", "--namespace", help="Only this namespace.",
        autocompletion=completion.complete_namespaces,
    ),
]  # fmt: skip
AllNamespaces = Annotated[
    bool, typer.Option("-A", "--all-namespaces", help="All namespaces, as without -n.")
]
NoHeaders = Annotated[
    bool, typer.Option("--no-headers", help="Leave out the titles of the columns.")
]
SortBy = Annotated[
    str, typer.Option("--sort-by", metavar="COLUMN", help="The column that orders the rows.")
]
Limit = Annotated[
    int, typer.Option("--limit", min=0, metavar="N", help="Show at most N rows; 0: all.")
]
NoPager = Annotated[
    bool,
    typer.Option("--no-pager", help="Print long output at once; on a terminal less shows it."),
]
FieldSelector = Annotated[
    str,
    typer.Option(
        "--field-selector", metavar="FIELD=VALUE,...",
        help="Only rows with these fields of -o json; also !=.",
    ),
]  # fmt: skip


def _refuse_labels(labels: str) -> str:
    if labels:
        raise typer.BadParameter(
            "the labels of Services are not stored on the node; "
            f"`kubectl get services -A -l {labels}` lists the names"
        )
    return labels


Labels = Annotated[str, typer.Option("-l", "--selector", hidden=True, callback=_refuse_labels)]


def split_name(name: str, namespace: str) -> tuple[str, str]:
    """Namespace ("" if none is given) and name of NAME or NAMESPACE/NAME. Raises
    typer.BadParameter if -n contradicts it.
    """
    name_namespace, _, bare = name.rpartition("/")
    if name_namespace and namespace not in ("", name_namespace):
        raise typer.BadParameter(
            f"{namespace} contradicts the namespace of {name}", param_hint="--namespace"
        )
    return name_namespace or namespace, bare


def choose_namespace(name: str, namespace: str, all_namespaces: bool) -> str:
    """The value of -n, "" with -A. Raises typer.BadParameter if it contradicts NAMESPACE/NAME."""
    chosen = "" if all_namespaces else namespace
    split_name(name, chosen)
    return chosen


class Selection(NamedTuple):
    """The rows to show, and their order: the values of the options above."""

    namespace: str = ""
    field_selector: str = ""
    sort_by: str = ""
    limit: int = 0

    def apply(self, page: Page) -> Page:
        """The page with these rows. Raises typer.BadParameter."""
        tests = self._tests(page.kind)

        def keep(row: Any) -> bool:
            return all(test(row) for test in tests)

        try:
            page = page.refined(keep if tests else None, self.sort_by, self.limit)
        except KeyError:
            titles = ", ".join(column.title for column in page.columns)
            raise typer.BadParameter(
                f"no column {self.sort_by}; there are {titles}", param_hint="--sort-by"
            ) from None
        if page.empty and self.namespace:
            return page.with_empty(f"No resources found in {self.namespace} namespace.")
        return page

    def _tests(self, kind: Kind) -> list[Callable[[Any], bool]]:
        tests = [_field_test(kind, part) for part in split_at_commas(self.field_selector) if part]
        if self.namespace and (namespaces := kind.namespaces):
            tests.append(lambda row: self.namespace in namespaces(row))
        return tests


def _field_test(kind: Kind, text: str) -> Callable[[Any], bool]:
    """The test of ``FIELD=VALUE``, ``FIELD==VALUE`` or ``FIELD!=VALUE``: a field of an item, or one
    below it; of a list any element.
    """
    field, equals, value = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"{text} is not FIELD=VALUE", param_hint="--field-selector")
    negated, value = field.endswith("!"), value.removeprefix("=")
    try:
        path = parse_item_path(kind, field.removesuffix("!"))
    except jsonpath.JsonPathError as error:
        raise typer.BadParameter(str(error), param_hint="--field-selector") from None

    def test(row: Any) -> bool:
        values = jsonpath.evaluate(path, msgspec.to_builtins(row))
        texts = [
            jsonpath.format_value(each)
            for value in values
            for each in (value if isinstance(value, jsonpath.LISTS) else (value,))
        ]
        return (value in texts) != negated

    return test


def parse_item_path(kind: Kind, text: str) -> jsonpath.Path:
    """The path of a field of an item. Raises JsonPathError if items have no such field."""
    assert kind.item is not None
    names = [field.name for field in msgspec.structs.fields(kind.item)]
    name = jsonpath.first_field(text)
    if name and name not in names:
        raise jsonpath.JsonPathError(f"no field {name}; there are {', '.join(names)}")
    return jsonpath.parse_path(text)
