"""What ``ppl compare`` leaves: every token, a page, and words that agree with the evidence."""

from __future__ import annotations

import html.parser
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import vl_convert

from equiv import document
from ppl import charts, charts_tokens, evidence, judge, outputs, page, report, thin, tokens, top1
from ppl.compare import ulp_distance
from ppl.errors import PplError
from ppl.evidence import PplEvidence
from ppl.runs import ACROSS, BETWEEN, KINDS, WITHIN, Run
from ppl.simulate import RUNS, base
from ppl.store import Floats, Key, Observed, Store, Stored

Change = Callable[[int, Run, Floats], Floats]
BUDGET = 100


def same(_text: int, _run: Run, values: Floats) -> Floats:
    return values


def noisy(text: int, run: Run, values: Floats) -> Floats:
    rng = np.random.default_rng([text, *run[1:], run[0] == "fused"])
    moved = values.copy()
    moved[BUDGET:] += rng.standard_normal(len(values) - BUDGET, dtype=np.float32) * 1e-3
    return np.minimum(moved, 0)


def fill(
    folder: Path,
    change: Change = same,
    *,
    texts: Sequence[str] = ("text0", "text1", "text2"),
    runs: Sequence[Run] = RUNS,
    rows: int = 400,
    top: Callable[[str, Run], tuple[np.ndarray, np.ndarray] | None] = lambda *_: None,
) -> Store:
    """Store results; ``top(text, run)`` gives arg-maxes and their log-probabilities."""
    store = Store(folder)
    for place, text in enumerate(texts):
        for run in runs:
            arm, launch, repeat = run
            best = top(text, run)
            key = Key(
                text=text,
                ids_sha256="0" * 64,
                tokens=rows + 1,
                model="m",
                arguments=("--max-num-batched-tokens", "100"),
                route=arm,
                versions={"vllm": "1"},
            )
            store.put(
                change(place, run, base(place, rows)),
                key=key,
                arm=arm,
                launch=launch,
                repeat=repeat,
                exposed_from=BUDGET,
                budget=BUDGET,
                observed=Observed(route=arm),
                response={} if best is None else {"top": top1.put(store, text, *best)},
            )
    return store


ODD = ("<script>alert(1)</script>", "a & b | c", "論語")


def compared(folder: Path, **options: Any) -> tuple[PplEvidence, Stored]:
    return judge.compare_stored([folder], **options), judge.gather([folder])


def specs(page_text: str) -> list[dict[str, Any]]:
    found = re.search(
        r'<script type="application/json" id="specs">(.*?)</script>', page_text, re.DOTALL
    )
    assert found is not None
    made: list[dict[str, Any]] = json.loads(found[1])
    return made


def data(spec: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the rows of every layer of a chart."""
    sets = spec.get("datasets", {})
    places = [layer.get("data", spec.get("data")) for layer in spec.get("layer", [spec])]
    return [p["values"] if "values" in p else sets[p["name"]] for p in places]


# -- tokens ---------------------------------------------------------------------------


def test_every_token_is_a_row_with_its_bits(tmp_path: Path) -> None:
    fill(tmp_path, noisy, texts=ODD)
    made, found = compared(tmp_path)
    tokens.write(tmp_path / "t.parquet", made, found)
    frame = pl.read_parquet(tmp_path / "t.parquet")
    assert dict(frame.schema) == dict(tokens.schema(made.runs))
    assert len(frame) == 1200
    for text in ODD:
        mine = frame.filter(pl.col("text") == text)
        assert mine["row"].to_list() == list(range(400))
        assert mine["position"].to_list() == list(range(1, 401))
        assert mine["exposed"].to_list() == [i >= 100 for i in range(400)]
        assert mine["chunk"].to_list() == [i // 100 for i in range(400)]
        arrays = {}
        for run in made.runs:
            store, record = found[text, run]
            arrays[run] = store.values(record)
            stored_bits = mine[tokens.column(run)].to_numpy().view(np.uint32)
            assert (stored_bits == arrays[run].view(np.uint32)).all()
        a, b = arrays["stock", 1, 1], arrays["fused", 1, 1]
        assert (mine["d_nats"].to_numpy() == b.astype(np.float64) - a).all()
        assert (mine["ulp"].to_numpy() == ulp_distance(a, b)).all()
        assert mine["top1_stock"].is_null().all()
    assert tokens.inputs_sha256(tmp_path / "t.parquet") == made.inputs_sha256


def test_a_long_text_is_written_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, noisy, texts=("a",), rows=950)
    made, found = compared(tmp_path)
    monkeypatch.setattr(tokens, "SLICE", 100)
    assert [len(f) for f in tokens.frames(made, found)] == [100] * 9 + [50]
    tokens.write(tmp_path / "t.parquet", made, found)
    frame = pl.read_parquet(tmp_path / "t.parquet")
    assert frame["row"].to_list() == list(range(950))


def test_a_damaged_result_leaves_the_old_file(tmp_path: Path) -> None:
    store = fill(tmp_path / "s", noisy)
    made, found = compared(tmp_path / "s")
    path = tmp_path / "out" / "tokens.parquet"
    tokens.write(path, made, found)
    before = path.read_bytes()
    victim = next(store.folder.rglob("*.f32"))
    victim.write_bytes(victim.read_bytes()[:-4] + b"\0\0\0\0")
    with pytest.raises(PplError, match="is damaged"):
        tokens.write(path, made, found)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


# -- arg-maxes ------------------------------------------------------------------------


def tops(flip: tuple[int, ...], k: int = 2) -> Any:
    """Return arg-maxes 7, then 9, a nat below; flipped in some rows of the fused arm."""

    def top(_text: str, run: Run) -> tuple[np.ndarray, np.ndarray]:
        ids = np.tile(np.array([7, 9], np.int32), (400, 1))
        logprobs = np.tile(np.array([-0.5, -1.5], np.float32), (400, 1))
        for row in flip if run[0] == "fused" else ():
            ids[row] = [9, 7]
            logprobs[row] = [-0.5, -0.625]
        return ids[:, :k], logprobs[:, :k]

    return top


def test_top_1_agreement_and_the_margin_at_each_flip(tmp_path: Path) -> None:
    fill(tmp_path, top=tops((150, 300)))
    made, found = compared(tmp_path)
    assert [t.text for t in made.top1] == ["text0", "text1", "text2"]
    one = made.top1[0]
    assert (one.rows, one.agreeing, one.exposed_rows, one.exposed_agreeing) == (400, 398, 300, 298)
    assert one.noise_agreeing == 400
    assert one.largest_margin_nats == 1.0
    assert [(f.row, f.stock_id, f.fused_id, f.fused_margin_nats) for f in one.flips] == [
        (150, 7, 9, 0.125),
        (300, 7, 9, 0.125),
    ]
    assert evidence.contradictions(made) == []
    tokens.write(tmp_path / "t.parquet", made, found)
    frame = pl.read_parquet(tmp_path / "t.parquet").filter(text="text1")
    flips = frame.filter(pl.col("top1_stock") != pl.col("top1_fused"))
    assert flips["row"].to_list() == [150, 300]
    assert flips["margin_stock"].to_list() == [1.0, 1.0]
    shown = document.markdown(report.blocks(made))
    assert "| text0 | 400 | 99.5000% | 300 | 99.3333% | 100.0000% | 1 |" in shown


def test_a_flip_in_a_relaunch_alone_is_not_identical(tmp_path: Path) -> None:
    def top(text: str, run: Run) -> tuple[np.ndarray, np.ndarray]:
        found: tuple[np.ndarray, np.ndarray] = tops((150,) if run[1:] == (2, 1) else ())(text, run)
        return found

    fill(tmp_path, lambda _text, _run, values: values, top=top)
    made, _ = compared(tmp_path)
    assert (made.verdict, made.exit_code) == ("EQUIVALENT", 1)
    assert made.decided.reasons[0].endswith(
        "bit-equal, but the arg-max of 3 rows of later fused runs isn't stock's"
    )
    assert [(t.agreeing, t.later_flips, t.flips) for t in made.top1] == [(400, 1, [])] * 3
    assert evidence.contradictions(made) == []
    wrong = made.model_copy(
        update={
            "verdict": "IDENTICAL",
            "exit_code": 0,
            "decided": made.decided.model_copy(update={"word": "IDENTICAL", "exit_code": 0}),
        }
    )
    assert "IDENTICAL, and arg-maxes of text0 aren't" in evidence.contradictions(wrong)


def test_one_arg_max_gives_flips_without_margins(tmp_path: Path) -> None:
    fill(tmp_path, top=tops((150,), k=1))
    made, _ = compared(tmp_path)
    assert made.top1[0].agreeing == 399
    assert made.top1[0].largest_margin_nats is None


def test_the_flips_with_the_largest_margins_are_listed(tmp_path: Path) -> None:
    flipped = tuple(range(100, 100 + 2 * top1.SHOWN))

    def top(_text: str, run: Run) -> tuple[np.ndarray, np.ndarray]:
        ids, logprobs = tops(flipped)(_text, run)
        if run[0] == "stock":
            logprobs[:, 1] = -0.5 - np.arange(400, dtype=np.float32) / 64
        return ids, logprobs

    fill(tmp_path, texts=("a",), top=top)
    (one,) = compared(tmp_path)[0].top1
    assert one.agreeing == 400 - len(flipped)
    assert [f.row for f in one.flips] == sorted(flipped, reverse=True)[: top1.SHOWN]
    assert one.largest_margin_nats == flipped[-1] / 64


def test_the_range_of_a_text_is_over_every_pair_of_launches(tmp_path: Path) -> None:
    shifts = {("stock", 1): 0.0, ("stock", 2): 0.5, ("fused", 1): 2.0, ("fused", 2): 4.0}

    def change(_text: int, run: Run, values: Floats) -> Floats:
        return values - np.float32(shifts[run[:2]])

    fill(tmp_path, change, texts=("a",))
    (text,) = compared(tmp_path)[0].texts
    assert text.difference_nats == pytest.approx((-2.75, -4.0, -1.5), abs=1e-6)


def test_a_damaged_arg_max_is_named(tmp_path: Path) -> None:
    store = fill(tmp_path, top=tops((150,)))
    victim = next(store.folder.rglob("*.top"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"\1")
    with pytest.raises(PplError, match="is damaged: its SHA-256"):
        compared(tmp_path)
    victim.unlink()
    with pytest.raises(PplError, match="can't read"):
        compared(tmp_path)


@pytest.mark.parametrize(
    ("ids", "logprobs"),
    [
        ([[7, 9]], [[-1.5, -0.5]]),  # worst first
        ([[7, 9]], [[-0.5, float("nan")]]),
        ([[7, -1]], [[-0.5, -0.6]]),
        ([[7, 9]], [[-0.5]]),
        ([7], [-0.5]),
    ],
)
def test_arg_maxes_that_cant_be_are_refused(tmp_path: Path, ids: Any, logprobs: Any) -> None:
    with pytest.raises(PplError, match="arg-max"):
        top1.put(Store(tmp_path), "t", np.array(ids, np.int32), np.array(logprobs, np.float32))


# -- charts ---------------------------------------------------------------------------


@pytest.mark.parametrize("change", [same, noisy], ids=["same", "noisy"])
@pytest.mark.parametrize("texts", [ODD, ("alone",)], ids=len)
def test_every_chart_compiles_and_draws(tmp_path: Path, change: Any, texts: Any) -> None:
    fill(tmp_path, change, texts=texts)
    made, found = compared(tmp_path)
    drawn = charts.draw(made, found)
    every = [*drawn.noise, *drawn.by_text, *drawn.position, *drawn.ulp]
    assert len(every) == 4 + len(texts)
    for chart in every:
        svg = vl_convert.vegalite_to_svg(chart.spec | {"width": 500})
        assert svg.startswith("<svg")
        assert "NaN" not in svg
        assert "undefined" not in svg


def test_a_thinned_chart_shows_the_largest_difference_and_says_so(tmp_path: Path) -> None:
    def change(text: int, run: Run, values: Floats) -> Floats:
        if text == 1 and run[0] == "fused":
            values[777] -= np.float32(2.5)
        return values

    fill(tmp_path, change, texts=("a", "b"), rows=3 * thin.BINS)
    made, found = compared(tmp_path)
    drawn = charts.draw(made, found)
    assert "Thinned" in drawn.position_caption
    assert f"{thin.BINS} bins, of at most 3 rows" in drawn.position_caption
    assert [c.title for c in drawn.position] == ["a", "b"]
    bars = [r for rows in data(drawn.position[1].spec) for r in rows if r.get("kind") == ACROSS]
    assert [(r["low"], r["at"]) for r in bars] == [(-2.5, 777)]
    cuts = data(drawn.position[1].spec)[1]
    assert [c["row"] for c in cuts] == list(range(100, 960, 100))
    fill(tmp_path / "short", texts=("a",), rows=thin.BINS)
    assert "Thinned" not in charts.draw(*compared(tmp_path / "short")).position_caption


def test_the_margin_interval_and_texts_of_the_chart_are_those_of_the_evidence(
    tmp_path: Path,
) -> None:
    fill(tmp_path, noisy)
    made, found = compared(tmp_path, margin=0.0005)
    assert made.statistics is not None
    chart = charts.draw(made, found).by_text[0]
    rows = {r["text"]: r for layer in data(chart.spec) for r in layer if "mean" in r}
    test = made.statistics.exposed
    assert rows[charts.ALL]["low"] == pytest.approx(test.low, rel=1e-4)
    assert rows[charts.ALL]["high"] == pytest.approx(test.high, rel=1e-4)
    for text in made.texts:
        assert text.difference_nats is not None
        assert rows[text.text]["mean"] == pytest.approx(text.difference_nats[0], rel=1e-4)
    assert {"a": -0.0005, "b": 0.0005} in data(chart.spec)[0]


def test_noise_within_and_between_launches_stands_beside_the_routes(tmp_path: Path) -> None:
    runs = [*RUNS, ("stock", 1, 2)]
    fill(tmp_path, noisy, runs=runs)
    made, found = compared(tmp_path)
    chart = charts.draw(made, found).noise[0]
    dots, pooled = data(chart.spec)
    assert {r["kind"] for r in dots} == set(KINDS)
    assert len(dots) == 3 * 10
    assert [r["kind"] for r in pooled].count(WITHIN) == 1
    assert [r["kind"] for r in pooled].count(BETWEEN) == 3
    by_hand = np.mean([{(i, j): d for i, j, d in t.run_distances}[0, 1] for t in made.texts])
    first = next(r for r in pooled if r["pair"] == "stock 1.1, stock 1.2")
    assert first["d"] == pytest.approx(by_hand, rel=1e-4)
    assert chart.note == ""
    fill(tmp_path / "once", runs=[("stock", 1, 1), ("fused", 1, 1)])
    said = charts.draw(*compared(tmp_path / "once"))
    assert said.noise[0].note == "Not measured: A/A between launches and A/A within a launch."
    assert "no arm ran twice, so there is no A/A" in said.position_caption


def test_only_distances_of_zero_stand_at_zero(tmp_path: Path) -> None:
    def change(text: int, run: Run, values: Floats) -> Floats:
        return noisy(text, run, values) if run[0] == "fused" else values

    fill(tmp_path, change)
    spec = charts.draw(*compared(tmp_path)).noise[0].spec
    assert "'0'" in json.dumps(spec)
    fill(tmp_path / "n", noisy)
    assert "'0'" not in json.dumps(charts.draw(*compared(tmp_path / "n")).noise[0].spec)


def test_many_texts_are_left_out_by_name_of_the_number(tmp_path: Path) -> None:
    names = [f"t{i:02d}" for i in range(40)]
    fill(tmp_path, noisy, texts=names, rows=120)
    made, found = compared(tmp_path)
    drawn = charts.draw(made, found)
    assert len(drawn.position) == charts_tokens.POSITIONS
    assert f"the {charts_tokens.POSITIONS} texts with the largest differences, of 40" in (
        drawn.position_caption
    )
    assert f"the {charts.BARS} texts with the largest differences, of 40" in (
        drawn.by_text[0].caption
    )
    sizes = {t.text: abs(t.largest.d_nats) for t in made.texts if t.largest}
    shown = {c.title for c in drawn.position}
    assert min(sizes[t] for t in shown) >= max(sizes[t] for t in names if t not in shown)


# -- page -----------------------------------------------------------------------------


class Tags(html.parser.HTMLParser):
    """Collects tags, their addresses, and the text of headings."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.addresses += [str(v) for k, v in attrs if k in {"src", "href", "data", "action"}]


def made_page(folder: Path, change: Any = noisy, **options: Any) -> tuple[str, PplEvidence]:
    fill(folder, change, **options)
    made, found = compared(folder)
    return page.html(made, charts.draw(made, found), "bytegate ppl compare x"), made


def test_the_page_stands_alone_and_escapes_names(tmp_path: Path) -> None:
    text, made = made_page(tmp_path, texts=ODD)
    seen = Tags()
    seen.feed(text)
    assert seen.addresses == []
    assert seen.seen.count("script") == 3  # the data, the library, and what draws
    assert "link" not in seen.seen
    assert "iframe" not in seen.seen
    assert "default-src 'none'" in text
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert len(specs(text)) == 4 + len(ODD)
    assert text.count('data-chart="') == len(specs(text))
    assert made.verdict in text
    assert "prefers-color-scheme: dark" in text


def test_the_top_of_the_page_says_what_was_not_covered(tmp_path: Path) -> None:
    text, made = made_page(tmp_path)
    top = text[: text.index("<h2>Strata")]
    for line in (*made.warnings, *made.not_covered):
        assert line in top
    assert top.count("NOT COVERED") == len(made.not_covered) > 0
    assert "minimum detectable shift" in top
    assert "noise floor" in top


def test_an_invalid_comparison_has_a_page_without_charts_and_no_tokens(tmp_path: Path) -> None:
    fill(tmp_path / "good")
    fill(tmp_path / "bad", runs=[("stock", 1, 1)])
    out = tmp_path / "out"
    outputs.leave(out, *compared(tmp_path / "good"))
    assert sorted(p.name for p in out.iterdir()) == [
        *("ppl.html", "ppl.json", "ppl.md", "tokens.parquet"),
    ]
    made, found = compared(tmp_path / "bad")
    assert made.verdict == "INVALID"
    outputs.leave(out, made, found)
    assert sorted(p.name for p in out.iterdir()) == ["ppl.html", "ppl.json", "ppl.md"]
    text = (out / "ppl.html").read_text(encoding="utf-8")
    assert "no run of fused is stored" in text
    assert "tokens.parquet" not in text
    assert "vegaEmbed" not in text


def test_markdown_and_page_have_the_same_figures(tmp_path: Path) -> None:
    text, made = made_page(tmp_path)
    shown = document.markdown(report.blocks(made, "bytegate ppl compare x"))
    seen = html.unescape(text)
    for _, value in report.facts(made):
        assert (value if isinstance(value, str) else value[0]) in seen
    for title, table in (*report.strata(made), *report.tables(made)):
        assert f"## {title}" in shown
        for row in table.rows:
            for cell in row:
                assert cell in seen
    assert "bytegate ppl compare x" in shown
    widths = {line.replace("\\|", "").count("|") for line in shown.splitlines() if "|" in line}
    assert widths <= {7, 5, 11}


def test_what_cant_be_written_is_one_line(tmp_path: Path) -> None:
    fill(tmp_path / "s")
    (tmp_path / "out").write_text("a file", encoding="utf-8")
    with pytest.raises(PplError, match="can't write"):
        outputs.leave(tmp_path / "out", *compared(tmp_path / "s"))
