"""Trained heads, against the modules of those who publish them: `speculators` and transformers."""

import json

import pytest
import torch
from head_tools import (
    BLOCK,
    DRAFT_VOCABULARY,
    HIDDEN,
    LAYERS,
    MASK,
    VOCABULARY,
    block_logits,
    prompts,
    reference,
    reference_block_head,
    reference_block_logits,
    reference_states_head,
    reference_states_logits,
    rewritten,
    saved,
    states_logits,
    states_of,
    tiny_target,
    token_map,
    trained,
)
from safetensors.torch import load_file, save_file
from tiny_models import one_line_of

import draftgraph
from draftgraph.errors import LoadError, UsageError
from draftgraph.models.heads.block import new_block_head
from draftgraph.models.heads.formats import export_head, is_head_folder, load_head
from draftgraph.models.heads.states import StatesHead, new_states_head

BOUND = 1e-4


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target("llama", tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return tiny_target("qwen3", tmp_path_factory.mktemp("models") / "qwen")


@pytest.fixture(scope="module")
def eagle_folder(target, tmp_path_factory):
    return saved(reference_states_head(target), tmp_path_factory.mktemp("heads") / "eagle")


@pytest.fixture(scope="module")
def block_folder(qwen, tmp_path_factory):
    return saved(reference_block_head(qwen), tmp_path_factory.mktemp("heads") / "dflash")


def agreement(name, ours, theirs, target, reads):
    """Compares logits on every prompt, and the first four proposals of the last place (of every place of a block)."""
    largest = same = same_best = places = 0
    for tokens in prompts():
        states = states_of(target, tokens, reads)
        here, there = ours(tokens, states), theirs(tokens, states)
        assert here.shape == there.shape and not torch.isnan(there).any()
        largest = max(largest, (here - there).abs().max().item())
        here, there = (found[0, 1:] if found.shape[1] == BLOCK else found[0, -1:] for found in (here, there))
        same += (here.topk(4).indices == there.topk(4).indices).all(-1).sum().item()
        same_best += (here.argmax(-1) == there.argmax(-1)).sum().item()
        places += len(here)
    print(f"\n{name}: largest difference of logits {largest:.1e}, best {same_best}/{places}, best four {same}/{places}")
    assert largest < BOUND
    assert same == same_best == places
    return largest


def same_as_states_reference(name, head, theirs, target):
    return agreement(
        name,
        lambda tokens, states: states_logits(head, tokens, states),
        lambda tokens, states: reference_states_logits(theirs, tokens, states)[0],
        target,
        head.reads,
    )


def same_as_block_reference(name, head, theirs, target):
    return agreement(
        name,
        lambda tokens, states: block_logits(head, tokens, states),
        lambda tokens, states: reference_block_logits(theirs, tokens, states),
        target,
        head.reads,
    )


def states_loss(target, reads):
    def loss(head):
        tokens = torch.cat(prompts(4), dim=-1)
        hidden = target(tokens, output_hidden_states=True).hidden_states
        from speculators.losses import resolve_loss_config

        _, found, _ = head(
            torch.cat([hidden[index] for index in reads], dim=-1).detach(),
            tokens,
            torch.zeros_like(tokens),
            verifier_last_hidden_states=hidden[-1].detach(),
            loss_config=resolve_loss_config("kl_div", "eager"),
        )
        return found

    return loss


def block_loss(target, reads):
    def loss(head):
        tokens = torch.cat(prompts(4), dim=-1)
        hidden = target(tokens, output_hidden_states=True).hidden_states
        from speculators.losses import resolve_loss_config

        _, found, _ = head(
            torch.cat([hidden[index] for index in reads], dim=-1).detach(),
            tokens,
            torch.ones_like(tokens),
            hidden[-1].detach(),
            torch.zeros_like(tokens),
            loss_config=resolve_loss_config("kl_div", "eager"),
            max_anchors=4,
        )
        return found

    return loss


# EAGLE-3

EAGLE_CASES = {
    "plain": {},
    "norm before residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True},
    "norm of each state": {"fc_norm": True, "norm_output": True},
    "Qwen3 layers": {"family": "qwen3"},
    "two layers": {"layers": 2},
    "whole vocabulary": {"columns": VOCABULARY},
    "four states": {"reads": (1, 2, 4, 5)},
    "default states": {"reads": None},
}


@pytest.mark.parametrize("case", EAGLE_CASES)
def test_speculators_eagle_head_gives_the_logits_of_speculators(case, target, tmp_path):
    theirs = reference_states_head(target, **EAGLE_CASES[case])
    head = load_head(saved(theirs, tmp_path / "head"), target)
    same_as_states_reference(f"speculators EAGLE-3, {case}", head, theirs, target)
    if case == "default states":
        assert head.reads == (2, LAYERS // 2, LAYERS - 3)
    if case == "whole vocabulary":
        assert getattr(head, "token_map", None) is None
    else:
        assert torch.equal(head.token_map, token_map())


def test_trained_speculators_eagle_head_gives_the_logits_of_speculators(target, tmp_path):
    theirs = trained(reference_states_head(target), states_loss(target, (2, 3, 4)))
    head = load_head(saved(theirs, tmp_path / "head"), target)
    same_as_states_reference("speculators EAGLE-3, trained", head, theirs, target)


@pytest.mark.parametrize("norm_output", [False, True])
def test_second_level_reads_the_head_s_own_states(norm_output, target, tmp_path):
    from transformers import DynamicCache

    theirs = reference_states_head(target, norm_output=norm_output)
    head, tokens = load_head(saved(theirs, tmp_path / "head"), target), prompts()[-1]
    states, count = states_of(target, tokens, head.reads), tokens.shape[1]
    expected = reference_states_logits(theirs, tokens, states, levels=2)[1]
    cache = DynamicCache(config=head.config)
    with torch.no_grad():
        first = head(tokens, states=head.project(states), past_key_values=cache)
        # Each node of the second level sees the text up to its parent, its parent and itself.
        seen = torch.cat([torch.ones(count, count).tril(), torch.eye(count)], dim=-1).bool()
        second = head(
            torch.nn.functional.pad(tokens[:, 1:], (0, 1)),
            position_ids=torch.arange(1, count + 1)[None],
            past_key_values=cache,
            attention_mask=torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None],
            states=first.states,
        ).logits
    difference = (second - expected).abs().max().item()
    print(f"\nspeculators EAGLE-3, second level: largest difference of logits {difference:.1e}")
    assert difference < BOUND


def as_authors_config(content):
    """A speculators configuration in the words of EAGLE-3's authors."""
    layers = dict(content["transformer_layer_config"])
    rope = layers.pop("rope_parameters")
    layers |= {"rope_theta": rope["rope_theta"], "rope_scaling": None, "architectures": ["LlamaForCausalLM"]}
    return layers | {"draft_vocab_size": content["draft_vocab_size"], "target_hidden_size": HIDDEN}


def as_specforge_config(content):
    section = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}
    return as_authors_config(content) | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": section}


def as_authors_tensors(tensors):
    named = {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}
    return {name: value for name, value in named.items() if name != "embed_tokens.weight"}


@pytest.mark.parametrize("weights", ["random", "trained"])
@pytest.mark.parametrize(
    ("config", "reads"), [(as_authors_config, (2, LAYERS // 2, LAYERS - 3)), (as_specforge_config, (2, 4, 5))]
)
def test_eagle_heads_of_authors_and_specforge_give_the_same_logits(config, reads, weights, target, tmp_path):
    theirs = reference_states_head(target, reads=reads)
    theirs = trained(theirs, states_loss(target, reads)) if weights == "trained" else theirs
    folder = rewritten(saved(theirs, tmp_path / "head"), tmp_path / "renamed", config, as_authors_tensors)
    head = load_head(folder, target)
    assert head.reads == reads
    assert head.get_input_embeddings().weight.data_ptr() == target.get_input_embeddings().weight.data_ptr()
    same_as_states_reference(f"{config.__name__}, {weights}", head, theirs, target)


@pytest.mark.parametrize(
    ("config", "ids", "reads"),
    [
        (as_authors_config, [1, 3, 5], (1, 3, 5)),  # states, as vLLM takes them
        (as_authors_config, [], (2, LAYERS // 2, LAYERS - 3)),
        (as_specforge_config, [1, 3, 5], (2, 4, 5)),  # its own section has layer outputs
        (dict, [1, 3, 5], (1, 3, 5)),
        (dict, [], (2, LAYERS // 2, LAYERS - 3)),
    ],
)
def test_states_that_are_named_at_the_top_level_are_read(config, ids, reads, target, eagle_folder, tmp_path):
    """As the format of speculators has them; an empty list means the usual ones."""

    def named(content):
        return config(content) | {"eagle_aux_hidden_state_layer_ids": ids}

    assert load_head(rewritten(eagle_folder, tmp_path / "named", named), target).reads == reads


def test_rope_of_a_head_is_its_own(target, tmp_path):
    """Published heads carry a rope of their own, in older fields than those of speculators."""
    theirs = reference_states_head(target, reads=(2, 3, 3))
    folder = saved(theirs, tmp_path / "head")
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64}

    def config(content):
        return as_authors_config(content) | {"rope_theta": 500000.0, "rope_scaling": scaling}

    head = load_head(rewritten(folder, tmp_path / "renamed", config, as_authors_tensors), target)
    assert head.config.rope_parameters["rope_theta"] == 500000.0
    assert head.config.rope_parameters["rope_type"] == "llama3"


# DFlash and JetSpec

BLOCK_CASES = {
    "plain": {},
    "one layer": {"layers": 1},
    "reduced vocabulary": {"columns": DRAFT_VOCABULARY},
    "sizes of Llama": {"family": "llama"},
}


@pytest.mark.parametrize("case", BLOCK_CASES)
def test_speculators_dflash_head_gives_the_logits_of_speculators(case, qwen, tmp_path):
    theirs = reference_block_head(qwen, **BLOCK_CASES[case])
    head = load_head(saved(theirs, tmp_path / "head"), qwen)
    assert (head.block_size, head.mask_token_id, head.causal) == (BLOCK, MASK, False)
    same_as_block_reference(f"speculators DFlash, {case}", head, theirs, qwen)


def test_trained_speculators_dflash_head_gives_the_logits_of_speculators(qwen, tmp_path):
    theirs = trained(reference_block_head(qwen), block_loss(qwen, (2, 4, 5)))
    head = load_head(saved(theirs, tmp_path / "head"), qwen)
    same_as_block_reference("speculators DFlash, trained", head, theirs, qwen)


def as_zlab_config(content, inside=False, **fields):
    """A speculators configuration in the words of DFlash's authors."""
    section = {"target_layer_ids": [index - 1 for index in content["aux_hidden_state_layer_ids"]]}
    section |= {"mask_token_id": content["mask_token_id"]} | fields
    size = {"block_size": content["block_size"]}
    named = content["transformer_layer_config"] | {"architectures": ["DFlashDraftModel"], "num_target_layers": LAYERS}
    return named | ({"dflash_config": section | size} if inside else {"dflash_config": section} | size)


@pytest.mark.parametrize("weights", ["random", "trained"])
@pytest.mark.parametrize("inside", [False, True])
def test_zlab_dflash_head_gives_the_same_logits(inside, weights, qwen, tmp_path):
    theirs = reference_block_head(qwen)
    theirs = trained(theirs, block_loss(qwen, (2, 4, 5))) if weights == "trained" else theirs
    folder = saved(theirs, tmp_path / "head")
    head = load_head(rewritten(folder, tmp_path / "z", lambda content: as_zlab_config(content, inside)), qwen)
    same_as_block_reference(f"z-lab DFlash, {weights}", head, theirs, qwen)


@pytest.mark.parametrize("inside", [False, True])
def test_zlab_mask_may_be_the_first_token(inside, block_folder, qwen, tmp_path):
    def config(content):
        made = as_zlab_config(content)
        made["dflash_config"]["mask_token_id"] = 0 if inside else None
        return made | {"mask_token_id": None if inside else 0}

    assert load_head(rewritten(block_folder, tmp_path / "z", config), qwen).mask_token_id == 0


def test_jetspec_head_sees_its_block_causally(qwen, tmp_path, monkeypatch):
    """The reference is speculators' module with a causal mask, which it has for layers with a window."""
    theirs = reference_block_head(qwen)
    folder = saved(theirs, tmp_path / "head")
    head = load_head(
        rewritten(folder, tmp_path / "jetspec", lambda content: as_zlab_config(content, causal_head=True)), qwen
    )
    assert head.causal
    theirs.uses_full_attn, theirs.uses_sliding_window_attn, theirs.sliding_window = False, True, 1000
    theirs.sliding_window_indices = [0, 1]
    same_as_block_reference("JetSpec", head, theirs, qwen)


def test_zlab_dflash_head_gives_the_logits_of_transformers(qwen, tmp_path):
    """transformers runs DFlash for `speculation_type="dflash"`, with one model that has its own names of tensors."""
    name = "transformers.models.muse_glimmer_assistant"
    theirs_module = pytest.importorskip(f"{name}.modeling_muse_glimmer_assistant")
    config = pytest.importorskip(f"{name}.configuration_muse_glimmer_assistant").MuseGlimmerAssistantConfig
    made = reference_block_head(qwen)
    folder = rewritten(saved(made, tmp_path / "head"), tmp_path / "z", as_zlab_config)
    head = load_head(folder, qwen)
    layers = {name: value for name, value in head.config.to_dict().items() if name != "model_type"}
    theirs = theirs_module.MuseGlimmerAssistantModel(
        config(**layers | {"sliding_window": 64}, target_layer_ids=[index - 1 for index in head.reads])
    ).eval()
    named = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    given = {named.get(name, name): value for name, value in load_file(folder / "model.safetensors").items()}
    theirs.load_state_dict(given)

    def logits(tokens, states):
        block = torch.cat([tokens[:, -1:], torch.full((1, BLOCK - 1), MASK)], dim=-1)
        with torch.no_grad():
            found = theirs(qwen.get_input_embeddings()(block), states[:, :-1], use_cache=False)
            return qwen.lm_head(found.last_hidden_state)

    agreement("transformers DFlash", lambda *given: block_logits(head, *given), logits, qwen, head.reads)


# Export


@pytest.mark.parametrize("case", ["plain", "norm before residual", "whole vocabulary", "Qwen3 layers"])
def test_exported_eagle_head_loads_in_speculators(case, target, tmp_path):
    theirs = reference_states_head(target, **EAGLE_CASES[case])
    head = load_head(saved(theirs, tmp_path / "head"), target)
    export_head(head, target, tmp_path / "out")
    back = reference().SpeculatorModel.from_pretrained(tmp_path / "out").eval()
    back.config.transformer_layer_config._attn_implementation = "eager"
    same_as_states_reference(f"exported EAGLE-3, {case}", head, eager(back), target)
    assert_same_tensors(load_head(tmp_path / "out", target), head)


@pytest.mark.parametrize("case", ["plain", "reduced vocabulary"])
def test_exported_block_head_loads_in_speculators(case, qwen, tmp_path):
    head = load_head(saved(reference_block_head(qwen, **BLOCK_CASES[case]), tmp_path / "head"), qwen)
    export_head(head, qwen, tmp_path / "out")
    back = reference().SpeculatorModel.from_pretrained(tmp_path / "out").eval()
    same_as_block_reference(f"exported DFlash, {case}", head, eager(back), qwen)
    assert_same_tensors(load_head(tmp_path / "out", qwen), head)


def test_heads_that_we_make_are_exported_and_read_back(target, tmp_path):
    made = [
        new_states_head(target, token_map(), reads=[2, 3, 5]),
        new_block_head(target, BLOCK, MASK, layers=2),
        new_block_head(target, BLOCK, MASK, causal=True),
    ]
    for index, head in enumerate(made):
        export_head(head, target, tmp_path / str(index))
        back = load_head(tmp_path / str(index), target)
        assert_same_tensors(back, head)
        assert (back.kind, back.reads, getattr(back, "causal", None)) == (
            head.kind,
            head.reads,
            getattr(head, "causal", None),
        )


@pytest.mark.parametrize("layers", [1, 2, 4, 7, 8, 12])
def test_new_heads_read_states_that_a_target_of_so_many_layers_has(layers):
    target = tiny_target(num_hidden_layers=layers)
    for head in (new_states_head(target), new_block_head(target, BLOCK, MASK)):
        reads = list(head.reads)
        assert reads == sorted(reads) and min(reads) >= 1 and max(reads) <= max(1, layers - 1)
        assert layers < 4 or len({*reads}) == len(reads)


def eager(back):
    """speculators chooses compiled masks for a head that it loads; plain ones give the same and need no compiler."""
    from speculators.models.attention import create_float_mask

    back.config.transformer_layer_config._attn_implementation = back._attn_impl = "eager"
    back._create_mask_fn = create_float_mask
    return back


def assert_same_tensors(head, other):
    ours, theirs = head.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(getattr(head, "token_map", torch.zeros(0)), getattr(other, "token_map", torch.zeros(0)))


# What is refused


def refusal(folder, target):
    with pytest.raises(UsageError) as error:
        load_head(folder, target)
    return one_line_of(error)


def test_folder_of_a_head_is_told_by_its_configuration(target, eagle_folder, block_folder, tmp_path):
    assert is_head_folder(eagle_folder) and is_head_folder(str(block_folder))
    assert not is_head_folder(target.config.name_or_path)
    assert not is_head_folder(tmp_path)
    assert "holds no trained head" in refusal(target.config.name_or_path, target)


def test_folder_of_a_head_can_be_named_as_the_draft(target, eagle_folder):
    pair = draftgraph.load(target, draft=eagle_folder)
    assert pair.target is target and isinstance(pair.draft, StatesHead) and pair.draft.token_map is not None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"hidden_size": 64}, "hidden size 32, not 64"),
        ({"vocab_size": 150}, "a vocabulary of 120, not 150"),
        ({"num_hidden_layers": 2}, "states [2, 3, 4] of 2 layers"),
    ],
)
def test_head_of_another_target_is_refused_with_what_does_not_fit(changed, said, target, eagle_folder):
    message = refusal(eagle_folder, tiny_target(**changed))
    assert said in message and str(target.config.name_or_path) in message


def test_block_head_of_a_target_with_other_layers_is_refused(block_folder, tmp_path):
    folder = rewritten(block_folder, tmp_path / "z", as_zlab_config)
    assert "layers: 6, not 7" in refusal(folder, tiny_target("qwen3", num_hidden_layers=7))


def test_another_name_of_the_target_is_only_noticed(eagle_folder, capsys):
    renamed = tiny_target()
    renamed.config.name_or_path = "some/other-name"
    load_head(eagle_folder, renamed)
    assert "was made for" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["pytorch_model.bin", "head.pt"])
def test_pickle_is_refused_with_how_to_convert_it(name, eagle_folder, target, tmp_path):
    (tmp_path / "config.json").write_text((eagle_folder / "config.json").read_text())
    torch.save({}, tmp_path / name)
    message = refusal(tmp_path, target)
    assert name in message and "save_file(" in message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: {k: v for k, v in tensors.items() if k != "fc.weight"}, "lacks fc.weight"),
        (lambda tensors: tensors | {"gate.weight": torch.zeros(2)}, "unknown tensors: gate.weight"),
        (lambda tensors: tensors | {"norm.weight": torch.zeros(2)}, "another size of norm.weight"),
        (lambda tensors: {k: v for k, v in tensors.items() if k != "d2t"}, "d2t is missing"),
        (lambda tensors: tensors | {"d2t": tensors["d2t"] + 100}, "outside of the vocabulary"),
    ],
)
def test_missing_and_unexpected_tensors_are_refused_by_name(change, said, eagle_folder, target, tmp_path):
    assert said in refusal(rewritten(eagle_folder, tmp_path / "changed", tensors=change), target)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"speculators_model_type": "dspark"}, "DSpark"),
        ({"speculators_model_type": "peagle"}, "P-EAGLE"),
        ({"speculators_model_type": "newest"}, "newest"),
        ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 256, "dflash_config": {}}, "DSpark"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "mask_token_id": 5, "draft_vocab_size": 9}, "P-EAGLE"),
        ({"medusa_num_heads": 4, "medusa_num_layers": 1}, "Medusa"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "EAGLE of the first"),
    ],
)
def test_other_kinds_of_heads_are_recognised_and_refused(content, said, target, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert is_head_folder(tmp_path)
    message = refusal(tmp_path, target)
    assert said in message and "not supported" in message


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"aux_hidden_state_layer_ids": [2, 4, LAYERS]}, "before its last norm"),
        ({"mask_token_id": None}, "no mask_token_id"),
    ],
)
def test_blocks_of_another_kind_are_refused(changed, said, block_folder, qwen, tmp_path):
    assert said in refusal(rewritten(block_folder, tmp_path / "changed", lambda content: content | changed), qwen)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rope_scaling": {"rope_type": "mrope"}}, "mrope"),
        ({"hidden_act": "best"}, "best"),
        ({"num_attention_heads": 0, "head_dim": None}, "ZeroDivisionError"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"eagle_aux_hidden_state_layer_ids": ["low"]}, "TypeError"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused_in_a_line(changed, said, eagle_folder, target, tmp_path):
    folder = rewritten(eagle_folder, tmp_path / "changed", lambda content: as_authors_config(content) | changed)
    with pytest.raises(LoadError, match=said) as error:
        load_head(folder, target)
    assert str(folder) in one_line_of(error)


@pytest.mark.parametrize("content", ["", "[]", '{"weight_map": 3}', '{"metadata": {}}'])
def test_a_damaged_index_of_tensors_is_refused_in_a_line(content, eagle_folder, target, tmp_path):
    folder = rewritten(eagle_folder, tmp_path / "copy")
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(LoadError, match=r"index\.json cannot be read") as error:
        load_head(folder, target)
    one_line_of(error)


def test_layers_of_another_family_are_refused(eagle_folder, target, tmp_path):
    def config(content):
        return content | {"transformer_layer_config": content["transformer_layer_config"] | {"model_type": "gemma3"}}

    assert "gemma3" in refusal(rewritten(eagle_folder, tmp_path / "changed", config), target)


def test_tensors_in_several_files_are_read(eagle_folder, target, tmp_path):
    tensors = load_file(eagle_folder / "model.safetensors")
    (tmp_path / "config.json").write_text((eagle_folder / "config.json").read_text())
    names = sorted(tensors)
    for index in range(2):
        part = {name: tensors[name] for name in names[index::2]}
        save_file(part, tmp_path / f"model-0000{index + 1}-of-00002.safetensors")
    assert_same_tensors(load_head(tmp_path, target), load_head(eagle_folder, target))
