"""Texts from files, folders and data sets."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import quote

import pytest

from texts.errors import TextError
from texts.sources import documents


def test_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.txt").write_text("one\n", encoding="utf-8")
    (tmp_path / "a" / "no.bin").write_bytes(b"\xff")
    (tmp_path / "two").write_text("two\n", encoding="utf-8")
    made = list(documents([str(tmp_path / "a"), str(tmp_path / "two")]))
    assert [(d.id, d.text) for d in made] == [("one.txt", "one\n"), ("two", "two\n")]
    with pytest.raises(TextError, match="two texts are called 'two'"):
        list(documents([str(tmp_path / "two")] * 2))


def test_bad_names_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="expected a text's id, a file, a folder or hf://NAME"):
        list(documents(["nope"]))
    with pytest.raises(TextError, match="has no file of"):
        list(documents([str(tmp_path)]))
    for spec in ("hf://", "hf://?split=test"):
        with pytest.raises(TextError, match="no data set is named; expected hf://NAME"):
            list(documents([spec]))
    with pytest.raises(TextError, match="unknown option"):
        list(documents(["hf://x?splitt=a"]))
    with pytest.raises(TextError, match="take='many': expected a number"):
        list(documents(["hf://x?take=many"]))


def test_two_data_sets_of_one_name_have_ids_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "texts.sources._stream", lambda _spec, _name, given: [{"text": str(given), "body": "b"}]
    )
    options = ("data_files=a", "data_files=b", "config=a", "revision=a", "column=body", "")
    made = list(documents([f"hf://json?{o}" for o in (*options, "characters=1")]))
    assert len({d.id for d in made}) == 7
    assert made[5].id == "json-train-0"
    again = next(documents(["hf://json?data_files=a"]))
    assert again.id == made[0].id
    twice = r"two texts are called 'json-train-0', of hf://json and of hf://json: leave one"
    with pytest.raises(TextError, match=twice):
        list(documents(["hf://json"] * 2))


def test_a_data_set_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="bytegate[datasets] is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    path = tmp_path / "rows.jsonl"
    rows = [{"text": "short"}, {"text": "long " * 50}, {"text": "longer " * 50}]
    path.write_text("\n".join(json.dumps(r) for r in rows), encoding="utf-8")
    spec = f"hf://json?data_files={quote(str(path))}"
    assert [d.text for d in documents([f"{spec}&take=2"])] == [r["text"] for r in rows[:2]]
    made = list(documents([f"{spec}&characters=100&skip=1"]))
    assert [d.text for d in made] == [rows[2]["text"]]
    assert made[0].id.startswith("json-train-1-")
    with pytest.raises(TextError, match="no text in column 'body'; columns are text"):
        list(documents([f"{spec}&column=body"]))
    with pytest.raises(TextError, match="3 documents of 1 characters, expected 9"):
        list(documents([f"{spec}&take=9"]))
    rows.insert(1, {"text": None})  # type: ignore[dict-item]
    path.write_text("\n".join(json.dumps(r) for r in rows), encoding="utf-8")
    assert [len(d.text) for d in documents([f"{spec}&take=3"])] == [5, 250, 350]
    with pytest.raises(TextError, match="split"):
        list(documents([f"{spec}&split=nope"]))
