# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Runs the script of a report's page on a model of its elements, without a browser."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from py_mini_racer import MiniRacer

VOID = frozenset("meta link br input".split())


class _Tree(HTMLParser):
    """A page as nested lists: tag, attributes, then texts and elements."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.root: list[Any] = ["root", {}]
        self._open = [self.root]
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, Any]]) -> None:
        element = [tag, {name: value or "" for name, value in attrs}]
        self._open[-1].append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, Any]]) -> None:
        self._open[-1].append([tag, {name: value or "" for name, value in attrs}])

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        self._open[-1].append(data)

    def texts_of(self, tag: str, element: Any = None) -> list[tuple[dict[str, str], str]]:
        """Attributes and text of each such element."""
        found = []
        for item in (element or self.root)[2:]:
            if isinstance(item, list):
                if item[0] == tag:
                    found.append((item[1], "".join(item[2:])))
                found += self.texts_of(tag, item)
        return found


class ScriptPage:
    """A page whose script runs, or does not.

    Args:
        text: The page.
        fragment: Of its address, such as ``#rank-1``.
        runs_script: Whether the browser runs scripts.
    """

    def __init__(self, text: str, fragment: str = "", runs_script: bool = True) -> None:
        self._engine = MiniRacer()
        self._engine.eval(Path(__file__).with_name("script_dom.js").read_text())
        tree = _Tree(text)
        self.run(f"document.open({json.dumps(tree.root)}); location.hash = {json.dumps(fragment)}")
        if runs_script:
            (script,) = (text for attributes, text in tree.texts_of("script") if not attributes)
            self.run(script)
            self.run("settle()")

    def run(self, code: str) -> None:
        """Run statements."""
        self._engine.eval(f"{code}\n; undefined")

    def get(self, expression: str) -> Any:
        """The value of an expression."""
        return json.loads(self._engine.eval(f"JSON.stringify({expression}) ?? 'null'"))

    def fire(self, element: str, event: str, **facts: Any) -> bool:
        """Send an event to an element, and draw; return whether the script handles it alone."""
        prevented = self.get(f"({element}).fire('{event}', {json.dumps(facts)})")
        self.run("settle()")
        return bool(prevented)

    def texts(self, selector: str) -> list[str]:
        """The texts of elements of the rank that is shown."""
        return self.get(f"inRank({json.dumps(selector)}).map((e) => e.textContent)")
