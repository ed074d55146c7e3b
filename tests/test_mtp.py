"""MTP layers in a target's own checkpoint, against transformers' own module and the families' own decoder layers."""

import copy
import json

import pytest
import torch
from cli_tools import Runner, refused, save_tiny_model
from head_tools import prompts, reference_mtp_head, rewritten, saved
from mtp_tools import (
    FAMILIES,
    PLAIN_FAMILIES,
    RECURRENT_FAMILIES,
    Checkpoint,
    is_read_by_transformers,
    logits_of_transformers,
    module_of_transformers,
)
from safetensors.torch import load_file, save_file
from tiny_models import one_line_of

import draftgraph
from draftgraph import GraphConfig, GraphDecoder
from draftgraph.errors import DraftGraphError, UnsupportedModelError
from draftgraph.files import PACKED
from draftgraph.models.heads.formats import is_head_folder, load_head
from draftgraph.models.heads.mtp import MtpHead, load_mtp

BOUND = 1e-4


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Checkpoints by family, and whether the MTP layer is trained."""
    known = {}

    def make(name, weights="random"):
        if (name, weights) not in known:
            checkpoint, folder = Checkpoint(name), tmp_path_factory.mktemp(name)
            if weights == "trained":
                checkpoint.train(make(name)[2])
            checkpoint.save(folder)
            known[name, weights] = checkpoint, folder, checkpoint.load(folder)
        return known[name, weights]

    return make


@pytest.mark.parametrize("weights", ["random", "trained"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers_and_of_the_family_s_own_layer(name, weights, made):
    checkpoint, _, target = made(name, weights)
    head = load_mtp(target)
    references = {"the family's layer": lambda *given: checkpoint.logits(*given).detach()}
    if is_read_by_transformers(name):
        module = module_of_transformers(target, name)
        references["transformers"] = lambda *given: logits_of_transformers(module, *given)
    largest, same = dict.fromkeys(references, 0.0), 0
    for tokens in prompts():
        given = tokens[:, 1:], checkpoint.states(target, tokens)[:, :-1]
        with torch.no_grad():
            ours = head(given[0], states=given[1], use_cache=False).logits
        for what, reference in references.items():
            theirs = reference(*given)
            assert ours.shape == theirs.shape and torch.isfinite(theirs).all()
            largest[what] = max(largest[what], (ours - theirs).abs().max().item())
            same += torch.equal(ours[0, -1].topk(4).indices, theirs[0, -1].topk(4).indices)
    print(f"\n{name}, {weights}: " + ", ".join(f"{what} {off:.1e}" for what, off in largest.items()))
    assert max(largest.values()) < BOUND
    assert same == len(references) * len(prompts())


@pytest.mark.parametrize("name", ["qwen3", "qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_head_of_speculators_gives_its_logits_at_two_levels(name, made, tmp_path):
    checkpoint, _, target = made(name)
    theirs = reference_mtp_head(target)
    head, largest = load_head(saved(theirs, tmp_path), target), 0.0
    assert is_head_folder(tmp_path) and head.reads == (checkpoint.layers,)
    for tokens in prompts():
        states = checkpoint.states(target, tokens)
        with torch.no_grad():
            levels, *_ = theirs(tokens, states)
            first = head(tokens[:, 1:], states=states[:, :-1], use_cache=False)
            second = head(tokens[:, 2:], states=first.states[:, :-1], use_cache=False)
        for ours, expected in zip((first, second), levels, strict=True):
            ours = ours.logits[:, : expected.shape[1]]
            largest = max(largest, (ours - expected).abs().max().item())
            assert torch.equal(ours.topk(4).indices, expected.topk(4).indices)
    print(f"\nspeculators MTP, {name}: largest difference of logits {largest:.1e}")
    assert largest < BOUND


# Decoding

NEW_TOKENS = 16
STYLES = {"greedy": {}, "sampled": {"do_sample": True, "temperature": 0.8, "seed": 4}}


@pytest.mark.parametrize("name", PLAIN_FAMILIES)
def test_every_mode_gives_the_tokens_of_plain_decoding(name, made):
    _, folder, _ = made(name, "trained")
    pair = draftgraph.load(str(folder), draft="mtp", dtype="float32")
    assert isinstance(pair.draft, MtpHead)
    prompt = prompts()[-1]
    for style, arguments in STYLES.items():
        told = {"max_new_tokens": NEW_TOKENS} | arguments
        plain = GraphDecoder(pair.target, config=GraphConfig(mode="off")).generate(prompt, **told)
        for mode in ("chain", "tree", "graph", "auto"):
            out = GraphDecoder(pair.target, pair.draft, config=GraphConfig(mode=mode)).generate(prompt, **told)
            assert torch.equal(out.sequences, plain.sequences), (style, mode)
            assert out.stats.draft_tokens > 0


@pytest.mark.parametrize("name", RECURRENT_FAMILIES)
def test_target_with_recurrent_layers_is_refused_though_its_mtp_layer_loads(name, made):
    _, _, target = made(name)
    with pytest.raises(UnsupportedModelError, match=r"linear_attention layers\) that cannot be rewound"):
        GraphDecoder(target, load_mtp(target)).generate(prompts()[0], max_new_tokens=2)


def test_what_a_trained_layer_drafts_is_accepted(made):
    """It has learnt what the target says behind these prompts: a shift by one token or state would show."""
    _, _, target = made("deepseek_v3", "trained")
    decoder = GraphDecoder(target, load_mtp(target), config=GraphConfig(mode="chain", chain_length=1))
    lengths = [decoder.generate(one, max_new_tokens=2).stats.mean_accepted_length for one in prompts()[-3:]]
    assert lengths == [2.0] * 3


# Where tensors are read, and what is refused


@pytest.fixture
def stored(made, tmp_path):
    """A function that writes the checkpoint of DeepSeek's family with other tensors, and its target."""
    _, folder, target = made("deepseek_v3")
    target = copy.copy(target)
    target.config = copy.deepcopy(target.config)
    target.config.name_or_path = str(tmp_path / "other")

    def store(change):
        return rewritten(folder, tmp_path / "other", tensors=change), target

    return store


LAST = "model.layers.3."


def without(*parts):
    return lambda tensors: {name: value for name, value in tensors.items() if not any(part in name for part in parts)}


def also(**more):
    given = {f"{LAST}{name.replace('__', '.')}": value for name, value in more.items()}
    return lambda tensors: tensors | given


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without(LAST), "has no MTP layers in its checkpoint: give another draft, or none"),
        (without("eh_proj"), "lacks eh_proj.weight"),
        (without("shared_head.norm"), "lacks shared_head.norm.weight"),
        (without(f"{LAST}self_attn.o_proj"), "lacks self_attn.o_proj.weight"),
        (without(f"{LAST}mlp.experts.1."), "another size of mlp.experts.down_proj, mlp.experts.gate_up_proj"),
        (also(gate__weight=torch.ones(2)), "unknown tensors: gate.weight"),
        (also(self_attn__o_proj__weight_scale=torch.ones(2)), "unknown tensors: self_attn.o_proj.weight_scale"),
        (also(enorm__weight=torch.ones(2)), "another size of enorm.weight"),
        (also(self_attn__o_proj__weight=torch.ones(2, 2)), "another size of self_attn.o_proj.weight"),
        (also(mlp__experts__0__up_proj__weight=torch.ones(2, 2)), "cannot be read"),
    ],
)
def test_layer_that_does_not_fit_is_refused_with_the_names_of_its_checkpoint(change, said, stored):
    _, target = stored(change)
    assert said in refusal(target)


def refusal(target, **options):
    with pytest.raises(DraftGraphError) as error:
        load_mtp(target, **options)
    return one_line_of(error)


def test_layers_under_other_names_are_refused_with_one_of_them(stored):
    def renamed(tensors):
        return {name.replace(LAST, "model.mtp.layers.0."): value for name, value in tensors.items()}

    _, target = stored(renamed)
    assert "names that are not supported (model.mtp.layers.0." in refusal(target)


def test_target_without_a_checkpoint_is_refused(stored, tmp_path):
    _, target = stored(None)
    for name, said in (
        ("", "the target was not loaded from a folder or the hub"),
        ("some/name", "some/name is not on this machine"),
        (str(tmp_path / "gone"), "is not on this machine"),
    ):
        target.config.name_or_path = name
        assert said in refusal(target, cache_dir=tmp_path)


def test_pickle_is_refused(stored, tmp_path):
    folder, target = stored(None)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "a pickle, pytorch_model.bin" in refusal(target)


def test_file_of_packed_weights_has_no_layers(stored):
    folder, target = stored(None)
    (folder / "model.safetensors").rename(folder / PACKED)
    assert "has no MTP layers in its checkpoint" in refusal(target)


def test_only_tensors_of_the_first_layer_are_read(stored, capsys):
    """All others lie in a file that cannot be read."""
    folder, target = stored(None)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    needed = without("shared_head.head", "embed_tokens")(tensors)
    needed = {name: value for name, value in needed.items() if name.startswith(LAST)}
    save_file(needed, folder / "mtp.safetensors")
    (folder / "rest.safetensors").write_bytes(b"nothing")
    places = {name: "mtp.safetensors" if name in needed else "rest.safetensors" for name in tensors}
    places["model.layers.4.enorm.weight"] = "rest.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    load_mtp(target)
    assert "several MTP layers: the first of them drafts at every level" in capsys.readouterr().err
    (folder / "mtp.safetensors").write_bytes(b"nothing")
    assert "mtp.safetensors cannot be read" in refusal(target)


def test_checkpoint_is_found_in_the_cache_of_the_hub(stored, tmp_path):
    folder, target = stored(None)
    snapshots = tmp_path / "models--some--name" / "snapshots"
    snapshots.mkdir(parents=True)
    folder.rename(snapshots / "abc")
    (tmp_path / "models--some--name" / "refs").mkdir()
    (tmp_path / "models--some--name" / "refs" / "main").write_text("abc")
    target.config.name_or_path = "some/name"
    assert load_mtp(target, cache_dir=tmp_path).reads == (3,)
    assert "some/name is not on this machine" in refusal(target, revision="other", cache_dir=tmp_path)


def test_blocks_in_eight_bits_are_multiplied_out(stored):
    """As DeepSeek publishes its weights: a scale for each block of a matrix."""
    side, whole = 8, {}

    def in_blocks(tensors):
        whole.update(tensors)
        blocks = {}
        for name, value in tensors.items():
            if name.startswith(LAST) and name.endswith("proj.weight") and "eh_proj" not in name:
                scale = value.unfold(0, side, side).unfold(1, side, side).abs().amax((2, 3)) / 448  # largest of e4m3
                spread = scale.repeat_interleave(side, 0).repeat_interleave(side, 1)
                blocks |= {name: (value / spread).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
        return tensors | blocks

    folder, target = stored(in_blocks)
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [side, side]}
    (folder / "config.json").write_text(json.dumps(content))
    found, stored_as = load_mtp(target).decoder.layers[0], whole[f"{LAST}mlp.experts.1.gate_proj.weight"]
    for here, expected in (
        (found.self_attn.o_proj.weight, whole[f"{LAST}self_attn.o_proj.weight"]),
        (found.mlp.experts.gate_up_proj[1][: len(stored_as)], stored_as),
    ):
        assert 0.0 < (here - expected).abs().max() < 0.07 * expected.abs().max()  # three bits of fraction


def test_command_line_takes_the_target_s_own_layer(capsys, monkeypatch, tmp_path):
    run, folder = Runner(capsys, monkeypatch), save_tiny_model(tmp_path)
    options = ["generate", "Why?", "--target", folder, "--max-new-tokens", 8]
    refused(run(*options, "--draft", "mtp"), "has no MTP layers in its checkpoint")
    tensors = load_file(folder / "model.safetensors")
    norm = tensors["model.norm.weight"]
    first = {name: weight for name, weight in tensors.items() if name.startswith("model.layers.0.")}
    layer = {name.replace("model.", "mtp."): weight for name, weight in first.items()}
    layer |= {f"mtp.{name}.weight": norm for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    layer["mtp.fc.weight"] = torch.cat([torch.eye(len(norm))] * 2, dim=-1)
    copied = {name: weight.clone() for name, weight in layer.items()}
    save_file(tensors | copied, folder / "model.safetensors", metadata={"format": "pt"})
    options += ["--json", "--mode", "tree", "--draft"]
    plain, drafted = (json.loads(run(*options, draft).out) for draft in ("none", "mtp"))
    assert plain["token_ids"] == drafted["token_ids"] and drafted["stats"]["draft_passes"] > 0
