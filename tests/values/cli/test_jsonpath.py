# SPDX-License-Identifier: Apache-2.0
"""JSONPath templates, as kubectl has them."""

from typing import Any

import pytest

from kbpf.cli.jsonpath import JsonPathError, parse_template, render

DOCUMENT: dict[str, Any] = {
    "kind": "List",
    "items": [
        {"name": "a", "port": 80, "tags": ["x", "y"], "a.b": 1, "open": True, "rtt": None},
        {"name": "b", "port": 443, "tags": [], "open": False, "inner": {"name": "deep"}},
        {"name": "c\x1b", "port": 53},
    ],
}
TEXTS = [
    ("{.kind}", "List"),
    (".kind", "List"),
    ("kind", "List"),
    ("{$.kind}", "List"),
    ("{@.kind}", "List"),
    ("{.items[*].name}", "a b c\\x1b"),
    ("{.items[0].name} and {.items[-1].port}", "a and 53"),
    ("{.items[0:2].port}", "80 443"),
    ("{.items[::2].port}", "80 53"),
    ("{.items[1:].port}", "443 53"),
    ("{.items[0,2].port}", "80 53"),
    ("{.items[0]['name','port']}", "a 80"),
    ('{.items[0]["name"]}', "a"),
    ("{['kind']}", "List"),
    (r"{.items[0].a\.b}", "1"),
    ("{.items[0]['a.b']}", "1"),
    ("{.items[0].tags}", '["x", "y"]'),
    ("{.items[0].open} {.items[0].rtt}", "true null"),
    ("{.items[*].tags[*]}", "x y"),
    ("{.items[0].*}", 'a 80 ["x", "y"] 1 true null'),
    ("{..name}", "a b deep c\\x1b"),
    ("{.items[1].inner..*}", "deep"),
    ("{.items[*].nothing}", ""),
    ("{.kind[*]}{.kind.name}{.items.name}", ""),
    ('{.items[?(@.name=="b")].port}', "443"),
    ("{.items[?(@.name == 'b')].port}", "443"),
    ("{.items[?(@.name!='b')].port}", "80 53"),
    ("{.items[?(@.port>=80)].name}", "a b"),
    ("{.items[?(@.port<80)].port}", "53"),
    ("{.items[?(@.open==true)].name}", "a"),
    ("{.items[?(@.rtt==null)].name}", "a"),
    ("{.items[?(@.inner)].name}", "b"),
    ("{.items[?(@.inner.name=='deep')].name}", "b"),
    ("{.items[?(@.name<80)].name}", ""),
    ("{.items[0].tags[?(@=='y')]}", "y"),
    ("{.items[?(@.name=='a]}')].name}", ""),
    ('{range .items[*]}{.port}{"\\t"}{@.open}{"\\n"}{end}', "80\ttrue\n443\tfalse\n53\t\n"),
    ("{range .items[0:1]}{range .tags[*]}<{@}>{end};{end}", "<x><y>;"),
    ('{\'{}\'}{"it\\"s"}', '{}it"s'),
]


@pytest.mark.parametrize(("template", "text"), TEXTS, ids=[row[0] for row in TEXTS])
def test_template(template: str, text: str):
    assert "".join(render(parse_template(template), DOCUMENT)) == text


ERRORS = [
    ("{.kind", "{ without }"),
    ("{}", "empty"),
    ("{end}", "{end} without {range}"),
    ("{range .items[*]}x", "{range} without {end}"),
    ("{.items[0}", "[ without ]"),
    ("{.items[name]}", "[name]"),
    ("{.items[?(@.a==b)]}", "needs quotes"),
    ("{.items[?(@.a=='b' && @.c)]}", "needs quotes"),
    ("{.items[?(.a)]}", "does not understand"),
    ("{.items[::0]}", "step 0"),
    ("{...name}", "not a path"),
    ("{.a b}", "not a path"),
    ("{.name | upper}", "not a path"),
    ("{.items[9].name}", "there is no [9], the list has 3"),
]


@pytest.mark.parametrize(("template", "words"), ERRORS, ids=[row[0] for row in ERRORS])
def test_what_is_not_understood_is_an_error(template: str, words: str):
    with pytest.raises(JsonPathError) as error:
        "".join(render(parse_template(template), DOCUMENT))
    assert words in str(error.value)
