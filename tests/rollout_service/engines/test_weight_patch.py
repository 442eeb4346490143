"""A patch of an engine's weights gives bit for bit what a load of the whole folder gives, on all ranks or on none."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.examples import FACTOR
from tests.rollout_service.engines.fused_model import Faults, FusedModel, random_tensors
from torch import Tensor

from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.engines.sglang import weight_patch
from penstock.rollout_service.engines.sglang.plugin import penstock_weight_patch as plugin
from penstock.rollout_service.engines.sglang.weight_patch import RankMap, Unmapped, WeightPatcher, write_patches
from penstock.rollout_service.engines.weight_changes import TensorChange, WeightChanges

BASE, NEXT = "3", "4"
NUMPY = {2: np.uint16, 4: np.uint32}


def integers(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def changed(tensors: dict[str, Tensor], *, seed: int, share: float = 0.02, to: int | None = None) -> dict[str, Tensor]:
    """A copy of which each tensor has a few other words, at least one; all of them ``to``, where that is set."""
    generator = torch.Generator().manual_seed(seed)
    after = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in after.values():
        words = integers(tensor)
        chosen = torch.randperm(len(words), generator=generator)[: max(1, int(share * len(words)))]
        words[chosen] = words[chosen] ^ 1 if to is None else to
    return after


def changes(before: dict[str, Tensor], after: dict[str, Tensor]) -> WeightChanges:
    found = []
    for name, tensor in before.items():
        old, new = (integers(one).numpy().view(NUMPY[one.element_size()]) for one in (tensor, after[name]))
        at = np.flatnonzero(old != new)
        if len(at):
            found.append(TensorChange(name, str(tensor.dtype).removeprefix("torch."), at, new[at], old[at]))
    num_words = sum(tensor.numel() for tensor in before.values())
    return WeightChanges(PolicyVersion(int(BASE)), PolicyVersion(int(NEXT)), num_words, tuple(found))


def loaded(tensors: dict[str, Tensor], dtype: torch.dtype, ranks: int, *, tied: bool) -> list[FusedModel]:
    models = [FusedModel(dtype, tied=tied, rank=rank, ranks=ranks) for rank in range(ranks)]
    for model in models:
        model.load_weights(tensors.items())
    return models


def mapped(model: FusedModel, tensors: dict[str, Tensor], path: Path) -> RankMap:
    found = plugin.build_map(model, tensors.items())
    plugin.check_map(model, found, tensors.items())
    plugin.write_map(model, found, str(path))
    return RankMap.read(path)


def same(models: Sequence[FusedModel], others: Sequence[FusedModel]) -> bool:
    return all(
        name == other_name and torch.equal(words, other_words)
        for model, other in zip(models, others, strict=True)
        for (name, words), (other_name, other_words) in zip(model.words(), other.words(), strict=True)
    )


class Ranks:
    """Applies a patch on all ranks at once, each in a thread, as the processes of a server do."""

    def __init__(self, models: Sequence[FusedModel]) -> None:
        self.models = models
        self._barrier = threading.Barrier(len(models), timeout=30)
        self._numbers = [0] * len(models)

    def apply(self, prefix: Path, served: str = BASE) -> list[str]:
        """Return each rank's figures, or its refusal with an exclamation mark before it."""

        def of(rank: int) -> str:
            def agree(number: int) -> int:
                self._numbers[rank] = int(number)
                self._barrier.wait()
                total = sum(self._numbers)
                self._barrier.wait()
                return total

            try:
                return plugin.apply_patch(self.models[rank], f"{prefix}.{rank}", served, agree)
            except plugin.Refused as refused:
                return f"!{refused}"

        with ThreadPoolExecutor(len(self.models)) as pool:
            return list(pool.map(of, range(len(self.models))))


class Setting:
    """Two ranks that serve ``before``, the patch to ``after``, and what a load of either gives."""

    def __init__(
        self,
        folder: Path,
        *,
        served: torch.dtype = torch.bfloat16,
        stored: torch.dtype = torch.bfloat16,
        tied: bool = False,
        ranks: int = 2,
        to: int | None = None,
    ) -> None:
        self.before = random_tensors(stored, tied=tied)
        self.after = changed(self.before, seed=1, to=to)
        self.models, self.old, self.new = (
            loaded(tensors, served, ranks, tied=tied) for tensors in (self.before, self.before, self.after)
        )
        maps = [mapped(model, self.before, folder / f"map.{rank}") for rank, model in enumerate(self.models)]
        self.maps, self.prefix, self.ranks = maps, folder / "patches" / "p", Ranks(self.models)
        write_patches(changes(self.before, self.after), maps, self.prefix)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("stored", "served"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float32),
    ],
)
def test_a_patch_gives_what_a_load_gives(
    tmp_path: Path, stored: torch.dtype, served: torch.dtype, *, tied: bool, ranks: int
) -> None:
    """Fused, padded, tied, transposed, sharded and derived parameters equal those of a full load, word for word."""
    setting = Setting(tmp_path, stored=stored, served=served, tied=tied, ranks=ranks)
    assert same(setting.models, setting.old)
    answers = setting.ranks.apply(setting.prefix)
    assert same(setting.models, setting.new)
    assert all(answer.startswith("words=") for answer in answers)
    again = setting.ranks.apply(setting.prefix)
    assert again == answers
    assert same(setting.models, setting.new)


def test_many_patches_give_what_the_last_load_gives(tmp_path: Path) -> None:
    tensors = random_tensors(torch.bfloat16, tied=True)
    models = loaded(tensors, torch.bfloat16, 2, tied=True)
    maps = [mapped(model, tensors, tmp_path / f"map.{rank}") for rank, model in enumerate(models)]
    for seed in range(50 * FACTOR):
        after = changed(tensors, seed=seed, share=0.001)
        write_patches(changes(tensors, after), maps, tmp_path / "p")
        assert all(answer[0] != "!" for answer in Ranks(models).apply(tmp_path / "p"))
        tensors = after
    assert same(models, loaded(tensors, torch.bfloat16, 2, tied=True))


@pytest.mark.parametrize("served", [torch.bfloat16, torch.float32])
def test_words_are_compared_as_bits(tmp_path: Path, served: torch.dtype) -> None:
    """A NaN is a word like others: it is written, found again, and replaced."""
    setting = Setting(tmp_path, served=served, to=0x7FC1)
    assert setting.ranks.apply(setting.prefix)[0][0] != "!"
    assert same(setting.models, setting.new)
    back = changes(setting.after, setting.before)
    write_patches(back, setting.maps, setting.prefix)
    assert setting.ranks.apply(setting.prefix)[0][0] != "!"
    assert same(setting.models, setting.old)


def test_making_a_map_writes_nothing(tmp_path: Path) -> None:
    """Fed with other values, the dry load leaves every word as it was, padding included."""
    model = loaded(random_tensors(torch.bfloat16, tied=False), torch.bfloat16, 1, tied=False)[0]
    before = [words.clone() for _, words in model.words()]
    others = random_tensors(torch.bfloat16, tied=False, seed=9)
    found = plugin.build_map(model, others.items())
    assert found.unmapped == []
    assert found.computed == {}
    assert found.padding == {"embed": 19 * 96, "head": 19 * 96}
    assert all(torch.equal(one, words) for one, (_, words) in zip(before, model.words(), strict=True))
    with pytest.raises(plugin.Refused, match="does not hold the words of"):
        plugin.check_map(model, found, others.items())


def test_a_loader_with_threads_is_mapped_whole() -> None:
    model = FusedModel(torch.bfloat16, faults=Faults(pools=True))
    assert plugin.build_map(model, random_tensors(torch.bfloat16, tied=True).items()).unmapped == []


def test_what_is_computed_first_is_named_and_not_patched(tmp_path: Path) -> None:
    """The map is accepted without it; a patch that touches it is not written."""
    before = random_tensors(torch.bfloat16, tied=True)
    model = FusedModel(torch.bfloat16, faults=Faults(computes=True))
    model.load_weights(before.items())
    of_rank = mapped(model, before, tmp_path / "map")
    after = changed(before, seed=1)
    with pytest.raises(Unmapped, match="have no known place"):
        write_patches(changes(before, after), [of_rank], tmp_path / "p")
    after["o_proj.weight"] = before["o_proj.weight"]
    write_patches(changes(before, after), [of_rank], tmp_path / "p")
    assert Ranks([model]).apply(tmp_path / "p")[0][0] != "!"


def test_a_parameter_that_no_tensor_fills_refuses_the_map() -> None:
    before = random_tensors(torch.bfloat16, tied=True)
    model = loaded(before, torch.bfloat16, 1, tied=True)[0]
    del before["norm.weight"]
    with pytest.raises(plugin.Refused, match="not loaded whole from the folder, such as norm"):
        plugin.check_map(model, plugin.build_map(model, before.items()), before.items())


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def corrupt_a_word(setting: Setting) -> None:
    flip(Path(f"{setting.prefix}.1"), -9)


def truncate(setting: Setting) -> None:
    path = Path(f"{setting.prefix}.1")
    path.write_bytes(path.read_bytes()[:-8])


def remove(setting: Setting) -> None:
    Path(f"{setting.prefix}.1").unlink()


def replan(setting: Setting, norm: Callable[[weight_patch.Block], list[weight_patch.Block]]) -> None:
    """Plan the patch with other blocks of a tensor of rank 1."""
    blocks = {name: [*of] for name, of in setting.maps[1].blocks.items()}
    blocks["norm.weight"] = norm(blocks["norm.weight"][0])
    maps = [setting.maps[0], RankMap(blocks, setting.maps[1].signatures)]
    write_patches(changes(setting.before, setting.after), maps, setting.prefix)


def shift_the_map(setting: Setting) -> None:
    replan(setting, lambda norm: [weight_patch.Block(norm.parameter, 0, 96, norm.dims)])  # it ends beyond its parameter


def disorder(setting: Setting) -> None:
    replan(setting, lambda norm: [norm, norm])  # one position twice


def rebind(setting: Setting) -> None:
    model = setting.models[1]
    model.qkv.data = model.qkv.data.t().contiguous().t()
    setting.old[1].qkv.data = model.qkv.data


def spoil_the_base(setting: Setting) -> None:
    """Change a word of rank 1 that the patch names, as another client's reload would."""
    at = changes(setting.before, setting.after).tensors[0].positions[0]
    for models in (setting.models, setting.old):
        part = models[0].embed if at < models[0].embed.numel() else models[1].embed
        integers(part.data)[at % part.numel()] ^= 4


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (corrupt_a_word, "another checksum"),
        (truncate, ""),
        (remove, "FileNotFoundError"),
        (shift_the_map, "beyond its end"),
        (disorder, "not increasing"),
        (rebind, "not what was mapped"),
        (spoil_the_base, "neither those of version 3 nor of 4"),
    ],
)
def test_one_rank_that_refuses_leaves_all_as_they_were(
    setting: Setting, fault: Callable[[Setting], None], reason: str
) -> None:
    fault(setting)
    answers = setting.ranks.apply(setting.prefix)
    assert all(answer[0] == "!" for answer in answers)
    assert any(reason in answer for answer in answers)
    assert same(setting.models, setting.old)


def test_a_patch_of_another_base_is_refused(setting: Setting) -> None:
    """Even where no word that it names differs: the version that is served must be the base."""
    assert setting.ranks.apply(setting.prefix, served="2") == [
        "!the patch is of version 3, the engine serves 2",
        "!the patch is of version 3, the engine serves 2",
    ]
    assert same(setting.models, setting.old)


@pytest.mark.parametrize("how", ["raises", "reads back another word"])
def test_a_write_that_fails_on_one_rank_is_undone_on_all(
    setting: Setting, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, numbers = plugin._Write.write, itertools.count(1)

    def write(self: plugin._Write) -> Tensor:
        number = next(numbers)  # the ranks are threads
        if number == 5 and how == "raises":
            raise RuntimeError("between two writes")
        return original(self) + (number == 5)

    monkeypatch.setattr(plugin._Write, "write", write)
    answers = setting.ranks.apply(setting.prefix)
    assert all("the words before are back" in answer for answer in answers)
    assert same(setting.models, setting.old)
    monkeypatch.undo()
    assert setting.ranks.apply(setting.prefix)[0][0] != "!"
    assert same(setting.models, setting.new)


def test_a_half_patched_engine_is_healed_by_the_same_patch(setting: Setting) -> None:
    for model, other in zip(setting.models, setting.new, strict=True):
        model.qkv.data.copy_(other.qkv)
        model.w2.data[1].copy_(other.w2[1])
    setting.ranks.apply(setting.prefix)
    assert same(setting.models, setting.new)


def test_a_patcher_stages_what_is_worth_it(tmp_path: Path) -> None:
    """It counts each load by its way, keeps no file behind, and stages nothing for a server without a map."""
    before = random_tensors(torch.bfloat16, tied=True)
    patcher, folder = WeightPatcher(), tmp_path / "a"
    small = changed(before, seed=1, share=0.0001)
    patcher.stage(changes(before, small), folder)
    assert patcher.take(PolicyVersion(4)) is None
    patcher.loaded()
    model = loaded(before, torch.bfloat16, 1, tied=True)[0]
    patcher.offer = weight_patch.Offer.read(
        {"internal_states": [{"penstock_weight_patch": {"protocol": 1, "tp_size": 1, "device": "cpu"}}]}
    )
    found = plugin.build_map(model, before.items())
    plugin.write_map(model, found, f"{patcher.map_prefix(folder)}.0.json")
    patcher.read_maps(folder)
    for what in (changes(before, small), changes(before, changed(before, seed=1, share=0.2)), "chain"):
        is_staged = patcher.stage(what, folder)  # type: ignore[arg-type]
        assert is_staged == (patcher.take(PolicyVersion(4)) is not None) == (len(list(tmp_path.glob("patches/*"))) == 1)
        patcher.loaded(8 if is_staged else None)
        assert list(tmp_path.glob("patches/*")) == []
    loads = {way: num for way, num in patcher.figures().items() if num}
    assert loads == {
        "engine_loads_unsupported": 1,
        "engine_loads_patch": 1,
        "engine_patch_bytes": 8,
        "engine_loads_dense": 1,
        "engine_loads_chain": 1,
    }


@pytest.mark.parametrize(
    "info", [None, {}, {"internal_states": []}, {"internal_states": [{}]}, {"internal_states": [{}, {}]}]
)
def test_a_server_without_the_plugin_offers_nothing(info: object) -> None:
    assert weight_patch.Offer.read(info) is None
