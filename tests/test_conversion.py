"""Converting GGUF files once: the same logits, whole or not at all, damage repaired."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import gguf
import pytest
import torch
from tiny_models import TEMPLATE, byte_level_tokens, logits, one_line_of, start_python, tokenizer_over, write_gguf
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from draftgraph.errors import LoadError
from draftgraph.files import sha256_of
from draftgraph.models import gguf_file, load_model
from draftgraph.models.gguf_file import ends_of_turn


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTGRAPH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DRAFTGRAPH_OFFLINE", raising=False)
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def written_gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("written") / "tiny.gguf"
    write_gguf(path)
    return path


@pytest.fixture(scope="session")
def written_conversion(written_gguf, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted") / "tiny"
    gguf_file.convert(written_gguf, folder)
    return folder


@pytest.fixture
def kept(written_gguf, written_conversion, cache):
    """The tiny GGUF, already converted into this test's cache."""
    place = gguf_file.folder_for(written_gguf.stem, sha256_of(written_gguf))
    return Path(shutil.copytree(written_conversion, place))


def test_a_converted_gguf_gives_the_logits_of_the_file(written_gguf, cache):
    model, tokenizer = load_model(written_gguf, device="cpu", dtype="float32")
    direct = AutoModelForCausalLM.from_pretrained(written_gguf.parent, gguf_file=written_gguf.name, dtype=torch.float32)
    assert torch.equal(logits(model), logits(direct))
    assert model.generation_config.eos_token_id == [0, 2]  # the file's eos, and the end of turn in its template
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 0, 0)
    assert tokenizer.chat_template == TEMPLATE
    assert not [path for path in (cache / "converted").iterdir() if path.name.endswith(".partial")]


def test_a_tokenizer_that_lies_beside_a_gguf_is_not_taken_for_its_own(written_gguf, tmp_path):
    tokenizer_over(["<unk>", "word"]).save_pretrained(tmp_path)
    path = Path(shutil.copy(written_gguf, tmp_path))
    assert len(load_model(path, device="cpu", dtype="float32")[1]) == len(byte_level_tokens())


def test_digits_are_split_off_before_spaces_are_joined(kept, written_gguf):
    tokenizer = load_model(written_gguf, device="cpu", dtype="float32")[1]
    assert tokenizer.tokenize("\n\n1  2") == ["ĊĊ", "1", "ĠĠ", "2"]
    assert tokenizer.decode(tokenizer.encode("a , b . é")) == "a , b . é"


def test_a_16_bit_gguf_is_kept_in_16_bits_and_loses_nothing(tmp_path):
    path = tmp_path / "half.gguf"
    write_gguf(path, kind=gguf.GGMLQuantizationType.F16)
    model, _ = load_model(path, device="cpu", dtype="float32")
    direct = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    assert model.dtype == torch.float32 and torch.equal(logits(model), logits(direct))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert (gguf_file.converted_folder(path) / "model.safetensors").stat().st_size < 2.2 * parameters


def test_a_second_start_reads_the_cached_copy(kept, written_gguf, monkeypatch, capsys):
    monkeypatch.setattr(gguf_file, "convert", None)
    load_model(written_gguf, device="cpu", dtype="float32")
    load_model(written_gguf.parent, device="cpu", dtype="float32")  # a folder with nothing but one GGUF file
    assert capsys.readouterr() == ("", "")


def test_a_changed_gguf_is_converted_anew(kept, written_gguf, tmp_path):
    path = Path(shutil.copy(written_gguf, tmp_path))
    before = logits(load_model(path, device="cpu", dtype="float32")[0])
    write_gguf(path, seed=1)
    assert not torch.equal(before, logits(load_model(path, device="cpu", dtype="float32")[0]))


def damage(folder, how):
    weights = folder / "model.safetensors"
    if how == "truncated weights":
        os.truncate(weights, weights.stat().st_size - 8)
    elif how == "broken header":
        content = weights.read_bytes()
        weights.write_bytes(content[:8] + b"#" + content[9:])
    elif how == "no weights":
        weights.unlink()
    elif how == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    elif how == "broken config":
        config = folder / "config.json"
        config.write_text("?" + config.read_text()[1:])
    elif how == "no manifest":
        (folder / gguf_file.MANIFEST).unlink()
    elif how == "older format":
        (folder / gguf_file.MANIFEST).write_text(json.dumps({"format": 0}))


@pytest.mark.parametrize(
    "how",
    [
        "truncated weights",
        "broken header",
        "no weights",
        "no tokenizer",
        "broken config",
        "no manifest",
        "older format",
    ],
)
def test_a_damaged_copy_is_noticed_and_made_again(written_gguf, how, capsys, monkeypatch):
    monkeypatch.setattr(gguf_file, "HASHED_BELOW", 64 << 10)  # so that the weights count as large, as real ones are
    kept = gguf_file.converted_folder(written_gguf)
    whole = logits(load_model(written_gguf, device="cpu", dtype="float32")[0])
    capsys.readouterr()
    damage(kept, how)
    assert torch.equal(whole, logits(load_model(written_gguf, device="cpu", dtype="float32")[0]))
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be used" in line and "converting it again" in line
    assert gguf_file.fault_of(kept) is None


MIDWAY = """
import sys, time
from pathlib import Path
from draftgraph.models import gguf_file, load_model
write_manifest = gguf_file.write_manifest
def midway(*arguments):
    print("midway", flush=True)
    while not Path(sys.argv[2]).exists():
        time.sleep(0.05)
    write_manifest(*arguments)
gguf_file.write_manifest = midway
load_model(sys.argv[1], device="cpu", dtype="float32")
print("loaded")
"""


def test_a_conversion_killed_midway_is_done_again_by_the_next(written_gguf, cache, tmp_path, capsys):
    killed = start_python(MIDWAY, written_gguf, tmp_path / "never")
    assert killed.stdout.readline() == "midway\n"
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    (left,) = (cache / "converted").glob("*.partial")
    model, tokenizer = load_model(written_gguf, device="cpu", dtype="float32")
    assert model.dtype == torch.float32 and tokenizer is not None
    assert not left.exists()
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_two_processes_convert_once(written_gguf, tmp_path):
    said = [tmp_path / "first", tmp_path / "second"]
    processes = [start_python(MIDWAY, written_gguf, tmp_path / "go", stderr=file.open("w")) for file in said]
    end = time.monotonic() + 100
    while not any("waiting" in file.read_text() for file in said) and time.monotonic() < end:
        time.sleep(0.05)
    (tmp_path / "go").touch()
    printed = sorted(process.communicate(timeout=100)[0] for process in processes)
    lines = [line for file in said for line in file.read_text().splitlines() if line.startswith("draftgraph")]
    assert printed == ["loaded\n", "midway\nloaded\n"]
    assert sorted("waiting" in line for line in lines) == [False, True], lines


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + bytes(100), b"PK not a gguf file", "half"])
def test_an_unreadable_gguf_is_said(written_gguf, tmp_path, cache, content):
    path = tmp_path / "bad.gguf"
    path.write_bytes(written_gguf.read_bytes()[:-150_000] if content == "half" else content)
    with pytest.raises(LoadError, match=r"bad\.gguf") as error:
        load_model(path, device="cpu", dtype="float32")
    assert "GGUF" in one_line_of(error)
    assert not list(cache.glob("converted/[!.]*")) and not list(cache.glob("converted/*.partial"))


def test_a_gguf_that_lacks_weights_is_refused(written_gguf, tmp_path):
    path = tmp_path / "bad.gguf"
    path.write_bytes(written_gguf.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.9.ffn_up.weight"))
    with pytest.raises(LoadError, match=r"lacks 1 weight of its model, model\.layers\.1\.mlp\.up_proj"):
        load_model(path, device="cpu", dtype="float32")


@pytest.mark.parametrize("where", ["before", "weights", "tokenizer"])
def test_a_full_disk_is_said_and_leaves_nothing(written_gguf, cache, monkeypatch, where):
    def full(self, folder, *_, **__):
        Path(folder).mkdir(exist_ok=True)
        (Path(folder) / "half").write_text("half-written")
        raise OSError(28, "No space left on device")

    if where == "before":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, 10))
    elif where == "weights":
        monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full)
    else:
        monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", full)
    with pytest.raises(LoadError, match="the disk is full") as error:
        load_model(written_gguf, device="cpu", dtype="float32")
    assert "DRAFTGRAPH_CACHE" in one_line_of(error)
    assert [path for path in (cache / "converted").iterdir() if path.suffix != ".lock"] == []


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_cache_that_cannot_be_made_is_said(written_gguf, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DRAFTGRAPH_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(LoadError, match="cannot write to the cache folder") as error:
        load_model(written_gguf, device="cpu", dtype="float32")
    one_line_of(error)


def test_the_end_of_a_turn_is_found_in_the_chat_template():
    vocabulary = {"<|im_end|>": 2, "<|eot_id|>": 3, "<|end|>": 4}
    assert ends_of_turn("... <|im_end|> ...", vocabulary) == [2]
    assert ends_of_turn("<|eot_id|><|end|>", vocabulary) == [3, 4]
    assert ends_of_turn("<|end|>", vocabulary | {"<|return|>": 5}) == []
