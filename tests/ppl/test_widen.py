"""Widened models: the same function, exact weights, and heads that can't be mixed up unseen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
for name in ("httpx2", "scipy", "stamina"):
    pytest.importorskip(name)

from kvroute import serve  # noqa: E402 - the packages decide first
from ppl import model, named, rounding  # noqa: E402
from ppl.errors import PplError  # noqa: E402
from ppl.model import evaluate, k3, network, widen  # noqa: E402
from ppl.options import Options  # noqa: E402
from ppl.servers import Launched  # noqa: E402

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
KINDS = {
    "kimi_linear": (k3.Network, k3.Shape(**TINY, q_lora_rank=24)),
    "deepseek_v2": (network.Network, network.Shape(**TINY)),
}
IDS = np.random.Generator(np.random.Philox(9)).integers(0, 256, 96).astype(np.uint8)
HEADS = 16


def tiny(kind: str) -> Any:
    """Return a random network whose weights are bfloat16's and whose attention is uneven."""
    made, shape = KINDS[kind]
    net: Any = made(shape)
    net.draw(torch.Generator().manual_seed(3))
    with torch.no_grad():
        for n, p in net.named_parameters():
            if p.ndim > 1 and "embed" not in n:
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
                p.mul_(2 / p.shape[1] ** 0.5)
            p.copy_(p.to(torch.bfloat16))
    return net.eval()


@pytest.fixture(scope="module", params=list(KINDS))
def pair(request: pytest.FixtureRequest) -> Any:
    source = tiny(request.param)
    made, drawn = widen.widen(source, HEADS)
    return SimpleNamespace(kind=request.param, source=source, made=made, drawn=drawn)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 24, 48])
def test_shares_are_powers_of_two_that_sum_to_one(count: int) -> None:
    found = widen.shares(count, np.random.Generator(np.random.Philox(1)))
    assert len(found) == count
    assert sum(found) == 1.0
    assert all(np.frexp(share)[0] == 0.5 for share in found)
    assert min(found) >= 1 / (4 * count)
    assert len(set(found)) > 1 or count in {2, 4}


def test_it_is_the_same_function(pair: Any) -> None:
    assert pair.made.shape == replace(pair.source.shape, num_attention_heads=HEADS)
    found = widen.check(pair.source, pair.made, pair.drawn, IDS)
    assert found["same"]["max_nats"] < 1e-4
    assert found["swapped"]["max_nats"] > 1e-3
    assert found["dropped"]["max_nats"] > 1e-3
    assert found["moved_nats"]["widened"] == pytest.approx(found["moved_nats"]["source"], abs=1e-4)


def test_no_weight_is_rounded(pair: Any) -> None:
    for w in pair.made.state_dict().values():
        assert torch.equal(w.to(torch.bfloat16).float(), w)


def test_no_two_heads_carry_the_same_bytes(pair: Any) -> None:
    s = pair.made.shape
    for layer in pair.made.model.layers:
        with torch.no_grad():
            kv = layer.self_attn.kv_b_proj(torch.randn(3, s.kv_lora_rank)).to(torch.bfloat16)
        heads = kv.unflatten(-1, (HEADS, -1)).transpose(0, 1)
        k, v = heads.split((s.qk_nope_head_dim, s.v_head_dim), -1)
        for part in (k, v):
            assert len({h.contiguous().view(torch.int16).numpy().tobytes() for h in part}) == HEADS


def test_a_rank_has_copies_of_several_trained_heads(pair: Any) -> None:
    for layer in pair.drawn:
        for rank in range(4):
            assert len({c.head for c in layer[rank * 4 : rank * 4 + 4]}) > 1


def test_layers_and_seeds_differ_and_one_seed_repeats(pair: Any) -> None:
    first, second = ([c.head for c in layer] for layer in pair.drawn)
    assert first != second
    again, other = (widen.widen(pair.source, HEADS, seed=s)[0] for s in (widen.SEED, 1))
    weight = "model.layers.0.self_attn.kv_b_proj.weight"
    mine = pair.made.state_dict()[weight]
    assert torch.equal(again.state_dict()[weight], mine)
    assert not torch.equal(other.state_dict()[weight], mine)


def test_a_head_that_changes_places_with_itself_moves_nothing(pair: Any) -> None:
    before = evaluate.nats(pair.made, IDS)
    assert np.array_equal(widen.swapped(pair.made, IDS, 0, (3, 3)), before)
    moved = widen.swapped(pair.made, IDS, 0, (3, 4)) - before
    assert np.abs(moved).max() > 1e-3
    assert np.array_equal(evaluate.nats(pair.made, IDS), before)  # the fault is gone again


@pytest.mark.parametrize("layer", range(TINY["num_hidden_layers"]))
def test_every_head_matters_in_every_layer(pair: Any, layer: int) -> None:
    before = evaluate.nats(pair.made, IDS)
    for head in range(HEADS):
        assert np.abs(widen.dropped(pair.made, IDS, layer, head) - before).max() > 1e-3


@pytest.mark.parametrize("part", ["kv_b_proj", "o_proj", "g_proj", "query"])
def test_a_wrong_widening_is_refused(pair: Any, part: str) -> None:
    """Two columns of one head change places in one tensor alone; right before and after."""
    query = "q_b_proj" if pair.kind == "kimi_linear" else "q_proj"
    part = query if part == "query" else part
    at = f"model.layers.1.self_attn.{part}.weight"
    state = pair.made.state_dict()
    if at not in state:
        assert (pair.kind, part) == ("deepseek_v2", "g_proj")
        return
    wrong = type(pair.made)(pair.made.shape)
    dim = 1 if part == "o_proj" else 0
    order = torch.arange(state[at].shape[dim])
    order[[0, 1]] = order[[1, 0]]
    wrong.load_state_dict({**state, at: state[at].index_select(dim, order)})
    with pytest.raises(PplError, match="isn't its source: a token moved"):
        widen.check(pair.source, wrong.eval(), pair.drawn, IDS)


def test_a_model_in_which_heads_do_not_matter_is_refused(pair: Any) -> None:
    blind = {k: w * (not k.endswith("o_proj.weight")) for k, w in pair.source.state_dict().items()}
    source = type(pair.source)(pair.source.shape)
    source.load_state_dict(blind)
    made, drawn = widen.widen(source.eval(), HEADS)
    with pytest.raises(PplError, match="the fault swapped moves a token by 0 nats at most"):
        widen.check(source, made, drawn, IDS)


def test_roundings_are_known_at_any_number_of_heads(pair: Any) -> None:
    assert [rounding.rows_of_block(n) for n in (1, 4, 96, 5000)] == [512, 512, 21, 1]
    exact = rounding.log_probs(pair.made, IDS.tolist(), lambda x: x, ranks=8)
    assert np.abs(exact + evaluate.nats(pair.source, IDS)).max() < 1e-4


# -- the command -----------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    network.save(tiny("kimi_linear"), tmp_path / "tiny")
    return tmp_path / "tiny"


def test_the_command_leaves_a_model_and_its_record(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "wide"
    words = ["--model", str(source), "--heads", "8", "--out", str(out), "--device", "cpu"]
    assert widen.main([*words, "--tokens", "200"]) == 0
    assert "against its source: rms" in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert config["num_attention_heads"] == config["num_key_value_heads"] == 8
    assert config["linear_attn_config"]["num_heads"] == 8
    record = json.loads((out / model.RECORD).read_text(encoding="utf-8"))
    assert record["source_sha256"] == model.sha256(source)
    assert record["weights_sha256"] == model.sha256(out)
    assert (record["source"], record["heads"], record["source_heads"]) == ("tiny", 8, 2)
    assert record["check"]["tokens"] == 200
    assert record["check"]["same"]["max_nats"] < widen.CLOSE_NATS
    assert str(tmp_path) not in (out / model.RECORD).read_text(encoding="utf-8")
    assert widen.main([*words, "--tokens", "0"]) == 0
    assert "NOT COVERED" in capsys.readouterr().out
    assert json.loads((out / model.RECORD).read_text(encoding="utf-8"))["check"] is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--heads", "7"], "expected a multiple of the model's 2, and more"),
        (["--heads", "2"], "expected a multiple of the model's 2, and more"),
        (["--text", "no-such-file"], "--text no-such-file: No such file"),
        (["--tokens", "9"], "expected at least 64 bytes"),
        (["--model", "nowhere"], "nowhere: not a model of this shape"),
        (["--out", "SOURCE"], "is the model itself"),
        (["--seed", "-1"], "--seed -1, --tokens 2048: expected neither below 0"),
        (["--tokens", "-5"], "expected neither below 0"),
        (["--device", "nosuch"], "--device nosuch: "),
        (["--device", "meta:x"], "--device meta:x: "),
    ],
)
def test_what_can_not_be_widened_is_one_line(
    words: list[str], says: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "wide"
    given = {"--model": str(source), "--out": str(out), "--device": "cpu", "--heads": "8"}
    given |= dict(zip(words[::2], words[1::2], strict=True))
    flat = [w.replace("SOURCE", str(source)) for pair in given.items() for w in pair]
    assert widen.main(flat) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert not out.exists()


def test_weights_of_another_model_are_not_mixed_in(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "wide"
    out.mkdir()
    (out / "model-00001-of-00002.safetensors").write_bytes(b"")
    given = ["--model", str(source), "--out", str(out), "--device", "cpu", "--heads", "8"]
    assert widen.main(given) == 2
    assert "holds model-00001-of-00002.safetensors, of another model" in capsys.readouterr().err
    assert len(list(out.iterdir())) == 1


def test_a_record_does_not_outlive_its_weights(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "wide"
    given = ["--model", str(source), "--out", str(out), "--device", "cpu", "--heads", "8"]
    assert widen.main([*given, "--tokens", "0"]) == 0
    assert (out / model.RECORD).exists()
    monkeypatch.setattr(widen, "CLOSE_NATS", -1.0)
    assert widen.main([*given, "--seed", "5"]) == 2
    assert not (out / model.RECORD).exists()


# -- how such a model is served ---------------------------------------------------------


@pytest.fixture
def _plugin_there(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = SimpleNamespace(name="bytegate")
    monkeypatch.setattr(serve.importlib.metadata, "entry_points", lambda **_: [entry])


@pytest.mark.usefixtures("_plugin_there")
@pytest.mark.parametrize(("tp", "dcp"), [(8, 8), (8, 4), (4, 4)])
def test_a_widened_model_is_served_as_the_small_one_is(tp: int, dcp: int, source: Path) -> None:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["num_attention_heads"] = 96
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    bare = Launched(Options(model=str(source), full=True), str(source), "cuda")
    assert "--max-num-batched-tokens" not in bare.arguments
    (source / model.RECORD).write_text("{}", encoding="utf-8")
    options = Options(model=str(source), tp=tp, dcp=dcp, full=True)
    launched = Launched(options, str(source), "cuda")
    named.check(str(source), tp=tp, device="cuda")
    words = " ".join(serve.plan(launched.serve_options("fused"), {}, "cuda").command)
    for wanted in (
        f"--tensor-parallel-size {tp} --decode-context-parallel-size {dcp} ",
        "--max-num-batched-tokens 16384",
        "--kv-cache-memory-bytes 4G",
        "--gpu-memory-utilization 0.25",
        "--max-model-len 131072",
        "--skip-tokenizer-init",
    ):
        assert words.count(wanted) == 1


@pytest.mark.parametrize(("tp", "more"), [(8, 96), (6, 96), (5, 20)])
def test_too_few_heads_are_refused_with_the_command_that_makes_more(tp: int, more: int) -> None:
    says = (
        f"--tp {tp}: the small model has 4 heads, and every rank takes as many as another; make "
        f"one of {more}: python -m ppl.model.widen --heads {more} --out FOLDER, then --model FOLDER"
    )
    with pytest.raises(PplError) as caught:
        named.check(str(model.folder()), tp=tp, device="cuda")
    assert str(caught.value) == says
    named.check(str(model.folder()), tp=4, device="cpu")


def test_a_trained_model_of_too_few_heads_is_named_in_the_command(source: Path) -> None:
    with pytest.raises(PplError, match=f"widen --model {source} --heads 96 --out FOLDER"):
        named.check(str(source), tp=8, device="cuda")
    named.check(str(source), tp=2, device="cuda")


def test_a_folder_that_is_not_there_is_refused_with_the_command_that_makes_it() -> None:
    says = r"--model k3-96: no such folder; .*widen --heads 96 --out k3-96 \(.*--stage k3"
    with pytest.raises(PplError, match=says):
        named.check("k3-96", tp=8, device="cuda")
    named.check("org/name", tp=8, device="cuda")  # not a folder's name


def test_kimi_k3_without_a_gpu_is_refused(source: Path) -> None:
    with pytest.raises(PplError, match="computes the layers of kimi_linear on CUDA alone"):
        named.check(str(source), tp=2, device="cpu")
