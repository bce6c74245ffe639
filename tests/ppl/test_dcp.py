"""A sharded server against tensor parallelism alone: what roundings allow, and the verdict."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

for name in ("pydantic", "scipy", "torch"):
    pytest.importorskip(name)

import torch  # noqa: E402 - the packages decide first

from ppl import dcp, dcp_evidence, rounding  # noqa: E402
from ppl.dcp_evidence import TextFigures, figures  # noqa: E402
from ppl.errors import PplError  # noqa: E402
from ppl.model import k3  # noqa: E402
from ppl.model.network import Network, Shape  # noqa: E402
from ppl.options import Options  # noqa: E402
from ppl.pace import Pace  # noqa: E402

TOKENS = 120


def of(architecture: str) -> Network:
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
    if architecture == "kimi_linear":
        return k3.Network(k3.Shape(**small, q_lora_rank=48))
    return Network(Shape(**small))


@pytest.fixture(scope="module", params=["deepseek_v2", "kimi_linear"])
def network(request: pytest.FixtureRequest) -> Network:
    made = of(request.param)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in made.parameters():
            if p.ndim > 1:
                p.copy_(torch.randn(p.shape, generator=generator) * 2 / p.shape[1] ** 0.5)
    return made.eval()


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return [int(i) for i in np.random.default_rng(5).integers(0, 256, TOKENS)]


def test_without_roundings_a_twin_is_the_reference(network: Network, ids: list[int]) -> None:
    mine = rounding.log_probs(network, ids, lambda x: x, ranks=2)
    with torch.no_grad():
        rows = torch.log_softmax(network(torch.tensor([ids]))[0], -1)
    wanted = rows[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
    assert np.abs(mine - wanted.numpy()).max() < 1e-4


def test_each_part_of_a_kimi_layer_is_rounded(ids: list[int]) -> None:
    """What is rounded is counted: two more for the queries, three for the gate, no rotation."""

    def roundings(architecture: str) -> int:
        counted = []
        rounding.log_probs(of(architecture).eval(), ids, lambda x: counted.append(1) or x)
        return len(counted)

    layers = 2
    assert roundings("kimi_linear") - roundings("deepseek_v2") == layers * (2 + 3 - 2)


def test_another_architecture_is_not_taken_for_one_of_these(ids: list[int]) -> None:
    class Other(Network):
        pass

    with pytest.raises(PplError, match="where Other rounds isn't known"):
        rounding.log_probs(Other(Shape(num_hidden_layers=1)), ids, lambda x: x)


@pytest.mark.parametrize("gate", [1.0, 0.0])
def test_a_folder_of_either_architecture_gives_tolerances(
    gate: float, network: Network, ids: list[int], tmp_path: Path
) -> None:
    """The servers' part is played by bfloat16 itself, and by a model without its last layer."""
    for module in ("httpx2", "safetensors", "stamina"):
        pytest.importorskip(module)
    from ppl import dcp, model
    from ppl.facts import TextFacts
    from ppl.inputs import Input
    from ppl.model.network import load, save
    from ppl.options import Options
    from ppl.pace import Pace

    save(network, tmp_path)
    stored = load(tmp_path)
    with torch.no_grad():
        stored.model.layers[1].self_attn.o_proj.weight.mul_(gate)
    facts = TextFacts(text="t", title="", source="", sha256="", tokens=TOKENS, ids_sha256="")
    found = dcp.Found()
    found.scores["t"] = {
        "stock": rounding.log_probs(stored, ids, lambda x: x.bfloat16().float(), ranks=2)
    }
    assert (tmp_path / model.WEIGHTS).is_file()
    asked = Options(tp=2)
    with Pace() as pace:
        allowed = dcp._of_network(asked, str(tmp_path), [Input(facts, tuple(ids))], found, pace)
    assert found.not_covered == []
    assert allowed["t"](np.ones(TOKENS - 1, dtype=np.bool_)).rms > 0
    assert bool(found.amiss) == (gate == 0)


def rounded(unit: float) -> Any:
    """Round to nearest with so large a relative error: bfloat16 itself at 2^-9."""
    digits = int(-np.log2(unit))
    return lambda x: torch.ldexp((m := torch.frexp(x))[0].mul(2**digits).round(), m[1] - digits)


def test_what_bfloat16_really_does_stays_below_what_twins_allow(
    network: Network, ids: list[int]
) -> None:
    exact = rounding.log_probs(network, ids, lambda x: x, ranks=2)
    mine = rounding.log_probs(network, ids, lambda x: x.bfloat16().float(), ranks=2)
    other = rounding.log_probs(network, ids, lambda x: x.bfloat16().float(), ranks=1)
    allowed = rounding.tolerance(
        rounding.twins(network, ids, ranks=2), np.ones(TOKENS - 1, dtype=np.bool_)
    )
    for d in (mine - exact, mine - other):
        assert 0 < np.sqrt(np.mean(d.astype(np.float64) ** 2)) < allowed.rms
        assert np.abs(d).max() < allowed.largest


def test_coarser_roundings_than_the_servers_are_outside(network: Network, ids: list[int]) -> None:
    exact = rounding.log_probs(network, ids, lambda x: x, ranks=2)
    coarse = rounding.log_probs(network, ids, rounded(2.0**-6), ranks=2)
    allowed = rounding.tolerance(
        rounding.twins(network, ids, ranks=2), np.ones(TOKENS - 1, dtype=np.bool_)
    )
    assert np.sqrt(np.mean((coarse - exact).astype(np.float64) ** 2)) > allowed.rms


def test_coins_are_fair_and_as_large_as_stated() -> None:
    moved = rounding.rough(1, "cpu")(torch.ones(100_000))
    assert set(moved.unique().tolist()) == {1 - rounding.UNIT, 1 + rounding.UNIT}
    assert abs(float(moved.mean()) - 1) < 5 * rounding.UNIT / 100_000**0.5


def test_the_mean_over_texts_keeps_its_level() -> None:
    rng = np.random.default_rng(0)
    outside = 0
    for _ in range(2000):
        spread = rng.uniform(0.5, 2.0, 10)
        twins = rng.normal(0, spread[:, None], (10, rounding.TWINS))
        errors = np.sqrt(2.0) * twins.std(1, ddof=1)
        means = rng.normal(0, np.sqrt(2.0) * spread)
        outside += abs(means.mean()) > rounding.mean_tolerance(list(errors))
    assert outside <= 10  # 2 at the stated level; above 10 once in 100,000


ALLOWED = rounding.Tolerance(rms=0.05, largest=0.4, mean_error=0.001)


def text(d: Any, name: str = "t", allowed: rounding.Tolerance | None = ALLOWED) -> TextFigures:
    rows = np.arange(len(d))
    return TextFigures.of(
        name,
        np.asarray(d, dtype=np.float64),
        loop=(rows >= 100) & (rows < 900),
        behind=rows >= 100,
        differing=np.asarray(d) != 0,
        merged_from=500,
        allowed=allowed,
    )


def noise(scale: float) -> Any:
    d = np.random.default_rng(1).normal(0, scale, 1000)
    d[:100] = 0
    return d


def judged(*texts: TextFigures, amiss: tuple[str, ...] = ()) -> dcp_evidence.DcpEvidence:
    return figures(texts, amiss=amiss, not_covered=[], facts={})


def test_roundings_are_within(tmp_path: Path) -> None:
    one = text(noise(0.02))
    assert (one.judged, one.merged, one.control, one.decode) == (800, 400, 100, 100)
    made = judged(one, text(noise(0.03), "u"))
    assert (made.verdict, made.exit_code) == ("WITHIN", 0)
    dcp_evidence.write(tmp_path, made, "bytegate ppl dcp")
    assert dcp_evidence.read(tmp_path / "dcp.json").texts == made.texts
    assert "WITHIN" in (tmp_path / "dcp.md").read_text()


def moved(where: int | slice, by: float) -> Any:
    d = noise(0.02)
    d[where] += by
    return d


@pytest.mark.parametrize(
    ("d", "why"),
    [
        (noise(0.08), "root mean square"),
        (moved(700, 0.5), "a token moved"),
        (moved(5, 0.5), "a token moved"),  # of the control
        (moved(slice(100, 900), 0.01), "mean over texts"),
    ],
)
def test_more_than_roundings_is_outside(d: Any, why: str) -> None:
    made = judged(text(d), text(d, "u"))
    assert (made.verdict, made.exit_code) == ("OUTSIDE", 1)
    assert any(why in reason for reason in made.reasons)


def test_a_tail_that_decodes_wrongly_is_told_and_not_judged() -> None:
    off = judged(text(moved(slice(900, None), 1.5)))
    assert off.verdict == "WITHIN"
    (line,) = off.not_covered
    assert line.startswith("text t: its tail of 100 tokens runs as decode")
    assert judged(text(noise(0.02))).not_covered == []


def test_what_is_amiss_and_what_nothing_bounds_is_never_passed() -> None:
    assert judged(text(noise(0.02)), amiss=("alone: preempted",)).exit_code == 4
    assert judged().verdict == "INVALID"
    open_ = judged(text(noise(0.02), allowed=None))
    assert (open_.verdict, open_.exit_code) == ("NOT_COVERED", 4)


def test_a_report_that_was_changed_is_refused(tmp_path: Path) -> None:
    dcp_evidence.write(tmp_path, judged(text(noise(0.08))), "")
    path = tmp_path / "dcp.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"verdict": "WITHIN", "exit_code": 0}))
    with pytest.raises(PplError, match="damaged"):
        dcp_evidence.read(path)
    path.write_text(json.dumps(raw | {"not_covered": ["less"]}))
    with pytest.raises(PplError, match="damaged"):
        dcp_evidence.read(path)


def test_rechunking_bounds_what_another_architecture_rounds() -> None:
    chosen = np.arange(1000) >= 100
    apart = noise(0.02)
    allowed = rounding.of_rechunking(apart, chosen)
    assert allowed.largest is None
    assert allowed.rms == pytest.approx(2**0.5 * rounding.rms(apart[chosen]))

    def of(d: Any) -> dcp_evidence.DcpEvidence:
        one = text(d, allowed=allowed)
        return figures([one, one], amiss=[], not_covered=[], facts={}, twins=2)

    assert of(noise(0.02)[::-1].copy()).verdict == "WITHIN"
    assert of(noise(0.03)).verdict == "OUTSIDE"


def test_the_budget_is_halved_whatever_way_it_was_given() -> None:
    from ppl.dcp import with_budget

    wanted = ("--seed", "3", "--max-num-batched-tokens", "8192")
    assert with_budget(("--max-num-batched-tokens", "16384", "--seed", "3"), 8192) == wanted
    assert with_budget(("--max-num-batched-tokens=16384", "--seed", "3"), 8192) == wanted


def test_the_two_servers_differ_in_the_sharding_and_the_route() -> None:
    pytest.importorskip("httpx2")
    from ppl.dcp import Pair
    from ppl.options import Options

    pair = Pair(Options(route="fused"), "m", "cpu")
    alone, sharded = (pair.serve_options(arm) for arm in ("stock", "fused"))
    assert (alone.dcp, alone.route) == (1, "stock")
    assert (sharded.dcp, sharded.route) == (2, "fused")
    assert (alone.extra, alone.workspace) == (sharded.extra, sharded.workspace)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    asked = Options(out=tmp_path / "file", texts=("nosuch",))
    with pytest.raises(PplError, match=r"can't write to .*file: File exists"):
        dcp.run(asked, Pace(io.StringIO()))


@pytest.mark.parametrize("given", ["--alone", "--sharded"])
def test_one_address_is_one_too_few(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    from equiv.command import run_app
    from ppl.cli import ppl_app

    assert run_app(ppl_app, ["dcp", given, "http://one:8000"], "bytegate ppl") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "--alone and --sharded belong together" in said
