"""The policy: its defaults, what it refuses, and what it requires on which devices."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from evidence_tree import bytegate

from equiv.errors import UsageError
from equiv.gate import policy
from equiv.gate.collect import LAYERS


def load(folder: Path, text: str) -> policy.Policy:
    path = folder / "gate.toml"
    path.write_text(text, encoding="utf-8")
    return policy.load(path)


def test_the_packaged_policy_states_every_key_and_nothing_else() -> None:
    stated = tomllib.loads(policy.packaged())
    made = policy.load()
    for name, field in policy.Policy.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)
        assert name in stated
        assert inner is None or set(inner) == set(stated[name])
    assert set(stated) == set(policy.Policy.model_fields)
    assert made.kernel.profile == "dev"
    assert made.missing_gpu == "reported"


def test_it_is_short_and_every_key_is_explained() -> None:
    lines = policy.packaged().splitlines()
    assert len(lines) < 60
    assert sum("#" in line for line in lines) > 20


def test_what_is_left_out_has_the_default(tmp_path: Path) -> None:
    made = load(tmp_path, '[kernel]\nprofile = "gate"\n')
    assert made.kernel.profile == "gate"
    assert made.kernel.lanes == policy.load().kernel.lanes
    assert made.servers == policy.load().servers


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[kernel]\nprofil = 'gate'\n", "kernel.profil: there is no such key"),
        ("[kernel]\nprofile = 'long'\n", "kernel.profile: Input should be 'dev', 'gate' or"),
        ("[kernel]\nlanes = ['shape']\n", "kernel: unknown lane 'shape': expected patterns"),
        ("[kernel]\nlanes = []\n", "kernel.lanes"),
        ("[servers]\nmargin_nats = 0\n", "servers.margin_nats: Input should be greater than 0"),
        ("[servers]\nmargin_nats = nan\n", "servers.margin_nats"),
        ("[servers]\nclaim = 'alike'\n", "servers.claim: Input should be 'identical' or"),
        ("[loop]\nrequired = true\n", "loop.required"),
        ("schema_version = 2\n", "schema_version: Input should be 1"),
        ("kernel = 1\n", "kernel"),
        ("[kernel\n", "can't read the policy"),
        ("[loop]\nlanes = ['edge']\n", "loop: unknown lane 'edge': expected edges"),
        ("[loop]\ncpu_lanes = ['glue']\n", "loop: unknown lane 'glue': expected edges"),
        ("[servers]\nobserved = ['chunks']\n", "servers.observed.0: Input should be 'which route"),
        ("[servers]\ntexts = true\n", "servers.texts: Input should be a valid integer"),
        ("[servers]\nmargin_nats = '1'\n", "servers.margin_nats: Input should be a valid number"),
        ("clean_tree = 'no'\n", "clean_tree: Input should be a valid boolean"),
        (f"[servers]\ntexts = {'9' * 5000}\n", "can't read the policy"),
        (f"a = {'[' * 3000}\n", "can't read the policy"),
    ],
)
def test_a_policy_that_cannot_be_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError) as told:
        load(tmp_path, text)
    assert says in str(told.value)
    assert "\n" not in str(told.value)
    assert "bytegate gate policy" in str(told.value)


def test_bytes_that_are_no_text_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "gate.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="can't read the policy"):
        policy.load(tmp_path / "gate.toml")


@pytest.mark.parametrize(
    ("asked", "refused"),
    [("any", "gpu"), ("cpu", "both"), ("gpu", "gpu"), ("both", "both"), ("no", "no")],
)
def test_a_gpu_that_must_not_be_missing(tmp_path: Path, asked: str, refused: str) -> None:
    text = (
        f"[kernel]\nrequired = '{asked}'\n[loop]\nrequired = '{asked}'\n"
        f"[servers]\nrequired = '{asked}'\n[faults]\nkernel = '{asked}'\nloop = '{asked}'\n"
    )
    made = load(tmp_path, text)
    assert {made.requires(layer) for layer in LAYERS} == {asked}
    assert {made.needing_gpu().requires(layer) for layer in LAYERS} == {refused}
    again = load(tmp_path, "missing_gpu = 'refused'\n" + text)
    assert {again.requires(layer) for layer in LAYERS} == {refused}


def test_the_command_prints_what_it_reads(tmp_path: Path) -> None:
    done = bytegate("gate", "policy")
    assert done.code == 0
    assert load(tmp_path, done.said) == policy.load()


DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_document_shows_the_packaged_policy() -> None:
    text = (DOCS / "gate.md").read_text(encoding="utf-8")
    _, _, rest = text.partition("<!-- policy -->\n```toml\n")
    assert rest.partition("```\n<!-- end -->")[0] == policy.packaged()


def test_the_policies_of_the_guide_are_policies(tmp_path: Path) -> None:
    text = (DOCS / "guide.md").read_text(encoding="utf-8")
    found = [part.partition("```")[0] for part in text.split("```toml\n")[1:]]
    assert len(found) == 2
    own, pair = (load(tmp_path, x) for x in found)
    assert (own.kernel.candidates, own.loop.pack) == (("my_pack.py:kv_pack",), "my_pack:kv_pack")
    assert [pair.requires(layer) for layer in LAYERS] == ["any", "any", "no", "no", "no"]
