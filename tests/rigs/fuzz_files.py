"""Mutated and generated files of strangers against every reader that the product has for their kind.

    python -m tests.rigs.fuzz_files --seconds=3600 [--kinds=parquet,gguf] [--first=0] [--folder=fuzz-findings/files]
    python -m tests.rigs.fuzz_files --replay=fuzz-findings/files/gguf-1234.gguf

A case follows from its kind and its number. Each reader reads it in a process of its own. A finding is what ends otherwise than by success
or one of our errors: a traceback of another kind, an abort, more than `MAX_BYTES` above what the imports take, or more than `MAX_CPU_S`.
Of a table that is read, its own decoded bytes are allowed besides.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from safetensors.numpy import save

from penstock.agents.environments.tools.built_in import search
from penstock.console import evaluation_results
from penstock.console.registry import model_merge
from penstock.console.report import curves, event_fields, report
from penstock.deploy.config_import.import_config import import_config
from penstock.deploy.plan.memory.model_shape import read_shape
from penstock.deploy.quickstart_task import write_model
from penstock.forensics.backup import CONTENTS, read_backup
from penstock.protocol import model_folder
from penstock.protocol.chat_template import ChatTemplate
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.config import sources
from penstock.protocol.errors import PenstockError
from penstock.protocol.images import admission
from penstock.protocol.images.processor import read_processor
from penstock.protocol.record import checkpoint_state
from penstock.rollout_service.embedded_engine.model import low_rank, model_config, weights
from penstock.trainer.data import row_files
from penstock.trainer.learner import gguf_model, model_folder_check
from tests.gguf_file import write_gguf

MAX_BYTES, MAX_CPU_S = 512 * 1024**2, 10.0
_AT_ONCE = 20
_SPACE_BYTES = 4 * 1024**3  # what a reader may take at all, so that a finding is not the machine's end
WORST: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))


# ruff: noqa: E731
# fmt: off
def read_rows(path: Path) -> None:
    rows = row_files.open_rows(path)
    print("allowed", rows._table.nbytes if isinstance(rows, row_files._TableRows) else 0, file=sys.stderr)
    for number in range(min(len(rows), 1000)):
        rows.row(number)

def tokenize(folder: Path) -> None:
    tokenizer = ChatTokenizer.read(folder)
    tokenizer.decode(tokenizer.encode("sort 3 1 2, and " * 20)[:200])
    tokenizer.render([{"role": "user", "content": "hello"}], add_generation_prompt=True)

def imported(path: Path) -> None:
    import_config(path, None, path.with_name("out.toml"), as_json=True)

def of_engine(folder: Path) -> None:
    config = model_config.read_model_config(folder)
    model_config.read_eos_token_ids(folder)
    weights.read_checkpoint(folder, config)

Reader = Callable[[Path], object]
of_adapter: Reader = lambda folder: low_rank.read_adapter(folder / "adapter", model_config.read_model_config(folder), max_rank=64)
rendered: Reader = lambda path: ChatTemplate(path.read_text(errors="replace")).render([{"role": "user", "content": "hello"}], add_generation_prompt=True)
MODEL: tuple[Reader, ...] = (model_folder.check_folder, model_folder_check.check_folder, of_engine, partial(read_shape, key="model.path"), read_processor,
                             partial(model_folder_check.check_routers, router_replay=True), tokenize)
RUN: tuple[Reader, ...] = (lambda folder: list(curves.rows_of(folder)), curves.read, curves.read_training, curves.num_unreadable, report.stored_summary,
                           lambda folder: event_fields.read_object(folder / "config.json"), read_backup, evaluation_results.read_result)
OF_WEIGHTS: tuple[Reader, ...] = (model_folder.check_folder, of_engine, model_merge.open_model)
KINDS: dict[str, tuple[str, tuple[Reader, ...]]] = {  # the file within the folder of a case, and its readers; `case.…` are read without a folder
    "tokenizer": ("tokenizer.json", (tokenize,)), "tokenizer-config": ("tokenizer_config.json", (tokenize,)), "config": ("config.json", MODEL),
    "safetensors": ("model.safetensors", OF_WEIGHTS), "index": (model_folder.INDEX, OF_WEIGHTS), "gguf": ("case.gguf", (gguf_model.read_header,)),
    "adapter-config": ("adapter/adapter_config.json", (of_adapter,)), "adapter-weights": ("adapter/adapter_model.safetensors", (of_adapter,)),
    "template": ("case.jinja", (rendered,)), "parquet": ("case.parquet", (read_rows,)), "arrow": ("case.arrow", (read_rows,)), "csv": ("case.csv", (read_rows,)),
    "jsonl": ("case.jsonl", (read_rows, partial(search.read_corpus, passage_chars=1000))), "json": ("case.json", (read_rows, imported)),
    "yaml": ("case.yaml", (imported,)), "shell": ("case.sh", (imported,)), "run-file": ("case.toml", (lambda path: list(sources.from_files([path], [])),)),
    "metrics": ("metrics.jsonl", RUN), "summary": ("report.json", RUN), "run-config": ("config.json", RUN), "backup": (CONTENTS, RUN),
    "state": ("state.json", (checkpoint_state.read_state,)),
    "image": ("case.png", (lambda path: admission.pixels(admission.admit(path.read_bytes()).data, (64, 64)),)),
}
ODD: list[Any] = [None, True, -1, 0, 1, 2**31, 2**53, 2**64, 10**400, 1e308, float("inf"), float("nan"), "", "x" * 70_000, "\ud800", "../x", [], {},
                  [[]] * 50, {"a": {"a": []}}]
NUMBERS = [0, 1, 2, 127, 255, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1]
PIECES = {
    "template": """{% for m in messages %}|{{ m.role }}|{{ m.content }}|{% endfor %}|{% if x %}|{% endif %}|{{ range(9**9)|join }}|{% set ns = namespace(x='a' * 9**6) %}|
{% for i in range(99999) %}|{{ ns.x|map('upper')|list }}|{{ messages|tojson(indent=9**9) }}|{% macro f(a) %}{{ f(a ~ a) }}{% endmacro %}|{{ f('a') }}|{% generation %}|
{% set ns.x = ns.x ~ ns.x %}|{{ ns.x|indent(9**8) }}|{{ '%9999999999d'|format(1) }}|{{ 9**9**9 }}|{{ raise_exception(ns.x) }}|{% endgeneration %}|{{ 'a'.ljust(9**9) }}""",
    "yaml": "a: &x|{b: *x}|- *x|<<: *x|[*x, *x, *x]|!!python/object:os.system|!!binary aaaa|1e999|? [a]|: |2001-01-01|2001-99-99|${a.b}|defaults:|- a@b: c|'|\"|k: > |  |\t|"
            "actor_rollout_ref:|data.train_batch_size: 8|trainer:|  nnodes: x|algorithm: {adv_estimator: 7}|!!set {a}|!!omap [a: 1]|=|!!timestamp x|!!float x|!!int 0b|!!int ''",
    "shell": "python -m verl.trainer.main_ppo|A=$A$A$A$A|$A|${A}|$((9**9**9))|\\\n|'|\"|data.train_files=x|B=(1 2 3)|\"${B[@]}\"|`ls`|$(ls)|#|;|&&|cat <<E|E|+a.b=[1,2|{|}|--f=3",
    "run-file": "[a]|[[a]]|a = |{a = [[]]}|'''|\"\"\"|0x|1e999|a.b.c = 1|[trainer]|model.path = 'x'|inf|1979-05-27|= = |[|]|" + "[" * 500,
}
SMALL = [b"[],", b"{},", b'{"a":0},', b"0,", b'"a",', b"[[]],", b"1e9,", b'"\xe2\x82\xac",', b"-", b"[", b'{"a":', b'"', b"\n", b"a\n", b"a: b\n", b"- a\n",
         b"- [a, b]\n", b"9", b"a=1 ", b"a,", b"\0", b"{}\n", b'{"prompt":""}\n', b"\xff"]
AROUND = [b"%s", b"[%s0]", b'{"a": [%s0]}', b'{"weight_map": [%s0]}', b'{"prompt": [%s0]}\n', b'{"model": {"vocab": [%s0]}}', b'{"a": "%s']

def bytes_changed(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at, size = rng.randrange(len(changed) + 1), rng.choice([1, 2, 4, 8, 64])
        number = rng.choice(NUMBERS).to_bytes(8, "little")[:size]
        new = rng.choice([rng.randbytes(1), number, b"", bytes(changed[at : at + size]) * rng.choice([2, 10_000]), rng.randbytes(size)])
        changed[at : at + rng.choice([0, len(new), size])] = new
    return bytes(changed[: rng.randrange(len(changed) + 1)] if rng.random() < 0.1 else changed)

def value_changed(value: Any, rng: random.Random) -> Any:
    """Change one value or key somewhere in a JSON value."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return value * 2000 if isinstance(value, list) and rng.random() < 0.3 else rng.choice(ODD)
    key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    whole = dict(value) if isinstance(value, dict) else list(value)
    if rng.random() < 0.1:
        whole.pop(key)
    elif isinstance(whole, dict) and rng.random() < 0.1:
        whole[rng.choice(["", "a" * 9999, "num_hidden_layers", "\ud800"])] = rng.choice(ODD)
    else:
        whole[key] = value_changed(whole[key], rng)
    return whole

def amplified(kind: str, rng: random.Random) -> bytes:
    """Make a file of up to 60 MiB of small parts, which may take many times their size in memory or time."""
    part = rng.choice(SMALL)
    body = part * (rng.choice([2**16, 2**18, 2**20, 2**20, 2**23, 60 * 2**20][: 5 if rng.random() < 0.9 else 6]) // len(part))
    text = rng.choice(AROUND) % body
    if KINDS[kind][0].endswith(".safetensors"):
        return len(text).to_bytes(8, "little") + text
    return b"GGUF\3\0\0\0" + rng.choice(NUMBERS).to_bytes(8, "little") * 2 + body if kind == "gguf" else text

def table(kind: str, rng: random.Random) -> bytes:
    """Write a table of one or two columns whose values repeat, in any encoding and compression."""
    num, sink, codec = rng.choice([1, 100, 1000, 10**5, 10**6]), io.BytesIO(), rng.choice(["zstd", "lz4", None])
    text, zeros = pa.array(["a" * rng.choice([1, 100, 10**5, 10**7])]), pa.array(np.zeros(num, "i4"))
    first = rng.choice([
        lambda: pa.nulls(num, rng.choice([pa.int64(), pa.string(), pa.list_(pa.int8()), pa.struct([("a", pa.string())])])),
        lambda: pa.array(np.zeros(num, rng.choice(["i1", "i8", "f8"]))), lambda: text.dictionary_encode().take(zeros),
        lambda: text.take(zeros[: 2**25 // len(text[0].as_py())]), lambda: pa.ListArray.from_arrays([0, num], zeros),
        lambda: pa.ListArray.from_arrays([0, num], text.dictionary_encode().take(zeros)),
    ])()
    made = pa.table({"prompt": first, **({"b": pa.array(np.zeros(len(first), "i4"))} if rng.random() < 0.5 else {})})
    if kind == "arrow":
        with pa.ipc.new_file(sink, made.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
            writer.write_table(made)
        return sink.getvalue()
    encoding = rng.choice([None, "PLAIN", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"]) if pa.types.is_string(first.type) else None
    pq.write_table(made, sink, compression=codec or "none", use_dictionary=encoding is None, column_encoding=encoding and {"prompt": encoding},
                   row_group_size=rng.choice([None, 1000]), data_page_size=rng.choice([None, 2**30]), write_statistics=False)
    return sink.getvalue()

def seeds(scratch: Path) -> dict[str, list[bytes]]:
    """Write a model folder; return whole files of each kind that is mutated."""
    model = scratch / "model"
    write_model(model, seed=0)
    (model / "adapter").mkdir()
    size, layer = json.loads((model / "config.json").read_text())["hidden_size"], "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    (model / "adapter/adapter_model.safetensors").write_bytes(save({f"{layer}A.weight": np.zeros((2, size), "f4"), f"{layer}B.weight": np.zeros((size, 2), "f4")}))
    adapter = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none"}
    (model / "adapter/adapter_config.json").write_text(json.dumps(adapter))
    write_gguf(scratch / "seed.gguf")
    images = [io.BytesIO() for _ in range(4)]
    for sink, form in zip(images, ("png", "jpeg", "webp", "gif"), strict=True):
        Image.fromarray(np.arange(3072, dtype="u1").reshape(32, 32, 3)).save(sink, form)
    row = {"prompt": "a", "ground_truth": "1", "messages": [{"role": "user", "content": [{"type": "text", "text": "b"}]}], "extra_info": {"a": 1}}
    run = {"run_id": "r", "step": 1, "kind": "step", "loss": 0.5, "settings": {"trainer": {"num_ranks": 1}}, "streams": [], "objects": [], "totals": {}}
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(("a", "model.embed_tokens.weight"), "model-00001-of-00001.safetensors")}
    texts = {"index": index, "jsonl": row, "json": [row, row], **dict.fromkeys(("metrics", "summary", "run-config", "backup", "state"), run)}
    found = {kind: [json.dumps(value).encode()] for kind, value in texts.items()} | {"csv": [b"prompt,ground_truth\na,1\n"], "image": [one.getvalue() for one in images]}
    files = {kind: model / name for kind, (name, _) in KINDS.items() if kind not in found} | {"gguf": scratch / "seed.gguf"}
    return found | {kind: [file.read_bytes()] for kind, file in files.items() if file.is_file()}

def case(kind: str, whole: dict[str, list[bytes]], number: int) -> bytes:
    rng = random.Random(f"{kind} {number}")
    if rng.random() < 0.1:
        return amplified(kind, rng)
    if kind in PIECES:
        return rng.choice(["\n", "", " "]).join(rng.choices(PIECES[kind].split("|"), k=rng.randrange(1, 60))).encode()
    data = table(kind, rng) if kind in ("parquet", "arrow") else rng.choice(whole[kind])
    if kind in ("parquet", "arrow", "gguf", "csv", "image") or rng.random() < 0.3:
        return data if rng.random() < 0.1 else bytes_changed(data, rng)
    if not KINDS[kind][0].endswith(".safetensors"):
        return json.dumps(value_changed(json.loads(data), rng)).encode()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(value_changed(json.loads(data[8:end]), rng)).encode()
    return len(header).to_bytes(8, "little") + header + data[end:]

def measured(work: Callable[[], object]) -> tuple[str, int, float]:
    """Return what is wrong with how work ends in a process of its own, the bytes it takes above its imports, and its CPU seconds."""
    with tempfile.TemporaryFile("w+b") as said:
        if not (child := os.fork()):
            os.dup2(said.fileno(), 2)
            os.dup2(said.fileno(), 1)
            os._exit(_exit_code(work))
        _, status, used = os.wait4(child, 0)
        said.seek(0)
        text = said.read().decode(errors="replace")
    imports, *tables = [int(line.split()[1]) for line in text.splitlines() if line.startswith("allowed ")] or [0]
    size = max(0, used.ru_maxrss * 1024 - imports - max(tables, default=0))
    code, cpu_s = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
    too_much = f"{size >> 20} MiB " * (size > MAX_BYTES) + f"{cpu_s:.1f} s of CPU" * (cpu_s > MAX_CPU_S)
    return "" if code == 0 and not too_much else f"{too_much} exit {code}: {text.strip()[-1500:]}", size, cpu_s

def _exit_code(work: Callable[[], object]) -> int:
    Path("/proc/self/clear_refs").write_text("5")  # forgets the highest resident size so far
    print("allowed", int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize(), file=sys.stderr, flush=True)
    resource.setrlimit(resource.RLIMIT_DATA, (_SPACE_BYTES, _SPACE_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (3 * int(MAX_CPU_S), 4 * int(MAX_CPU_S)))
    try:
        work()
    except BaseException:  # noqa: BLE001 - whatever a reader raises
        traceback.print_exc(limit=-4)
        sys.stderr.flush()
        return 1
    return 0

def placed(kind: str, file: Path, scratch: Path) -> Path:
    """Put a file where its readers expect it; return what these are given."""
    name, readers = KINDS[kind]
    folder = scratch / file.name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(scratch / "model", folder, ignore=shutil.ignore_patterns("*" if readers is RUN else ""))
    if kind == "index":
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    shutil.copy(file, folder / name)
    return folder / name if name.startswith("case.") else folder

def read_all(kind: str, given: list[Path]) -> None:
    for reader in KINDS[kind][1]:
        for path in given:
            with contextlib.suppress(PenstockError):
                reader(path)

def tried(kind: str, files: list[Path], scratch: Path) -> Iterator[str]:
    """Yield what the readers of a kind do wrong with files: first with all together, as a process costs more than most files."""
    given = [placed(kind, file, scratch) for file in files]
    problem, size, cpu_s = measured(partial(read_all, kind, given))
    for file, path in zip(files, given, strict=True):
        if not problem:
            file.unlink()
            WORST[kind] = max(WORST[kind][0], size), max(WORST[kind][1], cpu_s)
            continue
        if text := measured(partial(read_all, kind, [path]))[0]:
            yield f"{file}: {text}"
        else:
            file.unlink()
    for path in given:
        shutil.rmtree(scratch / path.relative_to(scratch).parts[0])

def main(seconds: float = 600.0, kinds: str = ",".join(KINDS), first: int = 0, folder: Path = Path("fuzz-findings/files")) -> int:
    findings, end, num_files = Counter[str](), time.monotonic() + seconds, 0
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        whole = seeds(Path(name))
        while time.monotonic() < end:
            for kind in kinds.split(","):
                files = {folder / f"{kind}-{number}{Path(KINDS[kind][0]).suffix}": number for number in range(first, first + _AT_ONCE)}
                measured(lambda kind=kind, files=files: [file.write_bytes(case(kind, whole, number)) for file, number in files.items()])
                made = [file for file in files if file.exists()]  # a table may be more than a process may write
                for text in tried(kind, made, Path(name)):
                    print(text, flush=True)
                    findings[f"{kind}: {text.strip().splitlines()[-1][:160]}"] += 1
                num_files += len(made)
            first += _AT_ONCE
    worst = {kind: f"{size >> 20} MiB, {cpu_s:.1f} s" for kind, (size, cpu_s) in WORST.items()}
    print(json.dumps({"files": num_files, "next": first, "findings": findings, "most": worst}, indent=1))
    return 1 if findings else 0

def replay(file: Path) -> int:
    with tempfile.TemporaryDirectory() as name:
        seeds(Path(name))
        kind = file.name.rpartition("-")[0]
        print(*measured(partial(read_all, kind, [placed(kind, file, Path(name))])))
    return 0

if __name__ == "__main__":
    named = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:])
    types = {"seconds": float, "first": int, "folder": Path, "replay": Path}
    given = {key: types.get(key, str)(value) for key, value in named.items()}
    pa.set_memory_pool(pa.system_memory_pool())  # the others reserve gigabytes that they do not use
    sys.exit(replay(given["replay"]) if "replay" in given else main(**given))
