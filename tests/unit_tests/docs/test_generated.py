# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What is raised and logged is on the page of messages, and pictures are those of the code."""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from doc_pages import ROOT

from megatron.slipstream import config, preflight
from megatron.slipstream.config import MODEL_RULES, RULES, OffloadConfig
from megatron.slipstream.packed_sequences.options import PACKING_RULES, check_packing
from megatron.slipstream.plan.policy import PolicyOptions

USER_GUIDE = ROOT / "docs" / "user-guide"


@pytest.fixture(autouse=True)
def _tools_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


def tool(name: str) -> ModuleType:
    __import__(name)
    return sys.modules[name]


# --- messages -------------------------------------------------------------------------------------


def listed() -> list[str]:
    """The messages of the page, as they would be shown, with '…' for what differs."""
    text = (USER_GUIDE / "messages.md").read_text(encoding="utf-8")
    return [re.sub(r"\\(.)", r"\1", line[2:]) for line in text.splitlines() if line[:2] == "- "]


def is_listed(message: str) -> bool:
    message = " ".join(message.split())
    patterns = (".*".join(map(re.escape, text.split("…"))) for text in listed())
    return any(re.fullmatch(pattern, message) for pattern in patterns)


RAISED: dict[str, Callable[[], Any]] = {
    "rule": lambda: OffloadConfig(offload_verify=-1),
    "two goals": lambda: OffloadConfig(
        offload_target_memory_gib=1.0, offload_max_overhead_percent=1.0
    ),
    "function with parts": lambda: config.check_module_names(["cor_attn"]),
    "built rule": lambda: check_packing(
        SimpleNamespace(sequence_packing="greedy", seq_length=8, sft=True)
    ),
    "format string": lambda: preflight.require(preflight.check_dataset("/nowhere/data")),
    "check of an option": lambda: PolicyOptions(target_memory_bytes=1, max_overhead_percent=1.0),
}


@pytest.mark.parametrize("raises", RAISED.values(), ids=RAISED)
def test_an_error_is_found_on_the_page_of_messages(raises: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=".") as caught:
        raises()
    assert is_listed(str(caught.value)), caught.value


def test_every_rule_is_found_on_the_page_of_messages() -> None:
    parts = tool("docs_parts")
    rules = [rule for group in parts.option_groups() for rule in group.rules]
    assert {*RULES, *MODEL_RULES, *PACKING_RULES} <= set(rules)
    for rule in rules:
        gaps = parts.message_with_gaps(rule.message)
        assert is_listed(gaps.replace("…", "x")), gaps


PAGES_OF_OPTIONS = {
    "OffloadConfig": ("options.md", "cuda-graphs.md"),
    "PackingOptions": ("packed-sequences.md",),
    "DynamicContextParallelOptions": ("dynamic-context-parallel.md",),
    "ChunkGraphOptions": ("chunk-cuda-graphs.md",),
}
"""The pages that say what a group of options is not supported with."""


def test_every_option_that_a_rule_refuses_is_on_the_page_of_its_feature() -> None:
    num_rules = 0
    missing = []
    for group in tool("docs_parts").option_groups():
        pages = PAGES_OF_OPTIONS.get(group.cls_name, ())
        text = "".join((USER_GUIDE / page).read_text(encoding="utf-8") for page in pages)
        for rule in group.rules:
            num_rules += 1
            names = (rule.option, "--" + rule.option.replace("_", "-"))
            if not any(re.search(rf"(?<![\w-]){name}(?![\w-])", text) for name in names):
                missing.append((group.cls_name, rule.option))
    assert num_rules > 70
    assert missing == []


def test_every_flag_of_the_parser_has_a_heading() -> None:
    from megatron.slipstream.integration import arguments

    page = (USER_GUIDE / "options.md").read_text(encoding="utf-8")
    fields = [field.name for cls, _ in arguments._GROUPS for field in dataclasses.fields(cls)]
    assert len(fields) > 15
    flags = ["--" + name.replace("_", "-") for name in fields]
    assert [flag for flag in flags if f"\n### `{flag}`\n" not in page] == []


def test_a_message_that_nobody_says_is_not_listed() -> None:
    assert not is_listed("offload_verify=-1 is fine")


def calls_that_say_something() -> Iterator[tuple[str, str]]:
    """Longest piece of each constant text in a raise or a warning of the package."""
    for path in sorted((ROOT / "megatron" / "slipstream").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Raise(exc=ast.Call(func=ast.Name(id="ValueError"), args=[text])):
                    pass
                case ast.Call(func=ast.Attribute(attr="warning"), args=[text, *_]):
                    pass
                case _:
                    continue
            pieces = [n.value for n in ast.walk(text) if isinstance(n, ast.Constant)]
            words = [re.sub(r"%\S+", "…", str(piece)).split("…") for piece in pieces]
            longest = max((part for parts in words for part in parts), key=len, default="")
            if len(longest.split()) > 4:
                yield path.name, " ".join(longest.split())


def test_the_words_of_every_error_and_warning_are_on_the_page() -> None:
    said = list(calls_that_say_something())
    assert len(said) > 60
    text = "\n".join(listed())
    assert [(name, words) for name, words in said if words not in text] == []


def test_messages_that_troubleshooting_quotes_are_still_said() -> None:
    page = (USER_GUIDE / "troubleshooting.md").read_text(encoding="utf-8")
    section = page.partition("## What warnings mean")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    quotes = [quote for row in rows for quote in re.findall(r"`([^`]+)`", row)]
    quotes += re.findall(r"`([^`]*\w=?…[^`]*)`", page)
    assert len(quotes) > 12
    messages = [*listed(), *(f"attach(): {text}" for text in listed())]

    def is_said(quote: str) -> bool:
        pattern = ".*".join(map(re.escape, filter(None, re.split(r"\s*…\s*", quote))))
        return any(re.search(pattern, text) for text in messages)

    assert [quote for quote in quotes if not is_said(quote)] == []


def test_every_warning_of_a_training_has_its_meaning() -> None:
    page = (USER_GUIDE / "troubleshooting.md").read_text(encoding="utf-8")
    section = page.partition("## What warnings mean")[2].partition("\n## ")[0]
    quotes = [quote.removeprefix("attach(): ") for quote in re.findall(r"`([^`]+)`", section)]
    patterns = [".*".join(map(re.escape, filter(None, re.split("…", q)))) for q in quotes]
    messages = tool("messages_page")
    said = {
        message.text
        for path in (ROOT / "megatron" / "slipstream").rglob("*.py")
        for message in messages.Module(path).messages()
        if message.kind == "warning" and not {"doctor", "preflight.py"} & set(path.parts)
    }
    assert len(said) > 10
    assert [text for text in said if not any(re.search(p, text) for p in patterns)] == []


def test_reasons_to_stay_are_those_of_the_policies() -> None:
    from megatron.slipstream.plan import policy

    reasons = tool("messages_page").reasons_to_stay()
    assert policy.BACKWARD_FOLLOWS in reasons
    assert policy.NOT_NEEDED_FOR_TARGET in reasons
    assert set(reasons) <= {value for value in vars(policy).values() if isinstance(value, str)}


# --- compatibility --------------------------------------------------------------------------------


def test_releases_are_those_that_are_tested() -> None:
    # Read from the source: importing it takes seconds.
    source = (ROOT / "megatron/slipstream/patches/releases.py").read_text(encoding="utf-8")
    (tested,) = re.findall(r"^TESTED_RELEASES = (.*)$", source, re.M)
    assert ast.literal_eval(tested) == tool("compatibility_page").TESTED


def cell(setting: str, column: int) -> str:
    page = (USER_GUIDE / "compatibility.md").read_text(encoding="utf-8")
    (row,) = (line for line in page.splitlines() if line.startswith(f"| {setting} |"))
    return row.split("|")[column + 1].strip()


def test_what_a_rule_refuses_is_a_no_with_its_reason() -> None:
    page = (USER_GUIDE / "compatibility.md").read_text(encoding="utf-8")
    number = re.fullmatch(r"\*\*no\*\* \((\d+)\)", cell("`full_iteration`", 1))
    assert number is not None
    (reason,) = re.findall(rf"^{number[1]}\. (.*)$", page, re.M)
    assert reason.replace("\\", "").startswith("cuda_graph_impl='full_iteration' is not supported")


def test_what_nothing_refuses_is_a_yes_with_a_test_only() -> None:
    assert cell("expert parallel", 1).startswith("yes: [CPU](../../tests/functional_tests/")
    assert cell("float16", 1) == "not tested"


# --- pictures -------------------------------------------------------------------------------------

QUICK = ("one_f_one_b", "schedules", "groups", "one_layer", "hides", "peak", "graphs")


def pinned(package: str) -> str:
    (line,) = re.findall(rf"^{package}==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)
    return line


@pytest.fixture
def pictures() -> ModuleType:
    pytest.importorskip("matplotlib")
    if metadata.version("matplotlib") != pinned("matplotlib"):
        pytest.skip("another matplotlib draws another picture")
    return tool("generate_pictures")


@pytest.mark.parametrize("name", QUICK)
def test_a_picture_is_what_would_be_drawn(name: str, pictures: ModuleType) -> None:
    assert pictures.is_like(pictures.IMAGES / f"{name}.png", pictures.PICTURES[name]())


def test_another_picture_is_noticed(
    pictures: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not pictures.is_like(pictures.IMAGES / "hides.png", pictures.one_layer_png())
    pictures.IMAGES = tmp_path
    assert pictures.main(["--check", "peak"]) == 1
    assert "peak.png: not what would be drawn" in capsys.readouterr().err


def test_every_picture_of_concepts_is_drawn_by_the_script(pictures: ModuleType) -> None:
    shown = re.findall(r"\]\(images/(\w+)\.png\)", (USER_GUIDE / "concepts.md").read_text("utf-8"))
    assert set(shown) == set(QUICK)
    assert set(QUICK) < set(pictures.PICTURES)


def test_a_pipeline_that_waits_for_itself_is_not_drawn(pictures: ModuleType) -> None:
    backwards = [list(reversed(pictures.one_f_one_b(2, s, 2))) for s in range(2)]
    with pytest.raises(AssertionError, match="wait for each other"):
        pictures.times_of(backwards)
