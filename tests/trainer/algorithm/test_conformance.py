"""Every loss, estimator, penalty and correction against public implementations: outputs and gradients.

`tests/data/conformance.json.gz` holds what they return. `ADAPTERS` maps each public function to the Penstock
function and options it is compared with; `DISAGREEMENTS` lists the cases in which Penstock differs, with
the reason; `NOT_OFFERED` what it does not do; `OTHER_RULES` those that score answers. No other case may be left out.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.algorithm.tokens import drift_of
from torch import Tensor

from penstock.trainer.algorithm import kl as kl_
from penstock.trainer.algorithm import reward_shaping as shape
from penstock.trainer.algorithm.aggregation import Denominators, sequence_weight
from penstock.trainer.algorithm.corrections.age_band import age_band
from penstock.trainer.algorithm.corrections.importance import importance
from penstock.trainer.algorithm.corrections.m2po import m2po_limit
from penstock.trainer.algorithm.corrections.opsm import opsm
from penstock.trainer.algorithm.corrections.ratios import learning_rate_factor, log_weights
from penstock.trainer.algorithm.corrections.rejection import rejection, veto
from penstock.trainer.algorithm.estimators.baselines import gpg, opo, rloo
from penstock.trainer.algorithm.estimators.gae import gae_tokens
from penstock.trainer.algorithm.estimators.grpo import grpo
from penstock.trainer.algorithm.estimators.interface import Outcomes
from penstock.trainer.algorithm.estimators.pass_at_k import pass_at_k
from penstock.trainer.algorithm.estimators.reinforce_pp import reinforce_pp_baseline
from penstock.trainer.algorithm.group_filters.equal_rewards import rewards_differ
from penstock.trainer.algorithm.losses.ce_gppo import ce_gppo
from penstock.trainer.algorithm.losses.cispo import cispo
from penstock.trainer.algorithm.losses.covariance import clip_cov, kl_cov
from penstock.trainer.algorithm.losses.double_sided import double_sided
from penstock.trainer.algorithm.losses.dppo import dppo_kl, dppo_tv, dppo_tv_ratio
from penstock.trainer.algorithm.losses.dro import dro
from penstock.trainer.algorithm.losses.gmpo import gmpo
from penstock.trainer.algorithm.losses.gspo import gspo, gspo_token, luspo
from penstock.trainer.algorithm.losses.minirl import minirl
from penstock.trainer.algorithm.losses.ppo_clip import ppo_clip
from penstock.trainer.algorithm.losses.product_clip import product_clip
from penstock.trainer.algorithm.losses.reinforce import reinforce
from penstock.trainer.algorithm.losses.sapo import sapo
from penstock.trainer.algorithm.losses.tokens import LossTerms, Sequences, Tokens
from penstock.trainer.algorithm.losses.topr import topr
from penstock.trainer.algorithm.losses.value import value_loss
from penstock.trainer.algorithm.losses.vespo import vespo
from penstock.trainer.algorithm.mismatch import mismatch_figures, mismatch_metrics
from penstock.trainer.algorithm.preferences.answers import apo_zero, kto
from penstock.trainer.algorithm.preferences.interface import Pairs
from penstock.trainer.algorithm.preferences.margins import cpo, hinge, ipo, orpo, sigmoid, simpo

VECTORS = json.loads(gzip.decompress((Path(__file__).parents[2] / "data" / "conformance.json.gz").read_bytes()))
CASES = {case["id"]: case for case in VECTORS["cases"]}

KL_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "kl+": "k1+", "mse+": "k2+", "low_var_kl+": "k3+"}

DISAGREEMENTS = {
    "trl/grpo/luspo-sequence-wide-kl/base": "TRL averages the KL term over padding columns, so its value depends on the padding",
    "openrlhf/kl/k2": "the recorded output is that of k1, whatever the estimator",
    "openrlhf/kl/k3": "the recorded output is that of k1, whatever the estimator",
    "verl/pg/clip_cov-rng/token-mean/base": "which candidates are drawn depends on torch's random state, theirs and ours differ",
}
_BY_TOKEN = "an estimator credits trajectories and turns; a reward for each token is a critic's"
NOT_OFFERED = {
    "areal/prox_approx/base": "the loglinear form is compared in test_many_updates.py, and there is no other",
    "trl/reward/repetition/2": "a reward, for the user's own code",
    "trl/reward/repetition/3": "a reward, for the user's own code",
    "verl/adv/gdpo-multi/base": "the parts of a reward are one number before the trainer sees them",
    "verl/adv/gdpo-single/base": "the parts of a reward are one number before the trainer sees them",
    "verl/adv/optimal_token_baseline-zt0/base": _BY_TOKEN,
    "verl/adv/optimal_token_baseline-zt1/base": _BY_TOKEN,
    "verl/adv/reinforce_plus_plus-g0.9/base": _BY_TOKEN,
    "verl/adv/reinforce_plus_plus-g1.0/base": _BY_TOKEN,
    "verl/adv/remax/base": _BY_TOKEN,
    "verl/adv/tir_optimal_token_baseline-zt0/base": _BY_TOKEN,
    "verl/adv/tir_optimal_token_baseline-zt1/base": _BY_TOKEN,
    "verl/logprobs_from_logits/base": "torch's own cross-entropy",
}
# Rules for rewards, which are not losses: the reward service has its own, with tests of the differences.
OTHER_RULES = (
    "verl/reward/gsm8k-strict", "verl/reward/gsm8k-flexible", "verl/reward/math", "verl/reward/math_dapo-boxed",
    "verl/reward/math_dapo-answer", "verl/reward/qa_em", "verl/reward/normalize_answer", "math_verify/verify",
    "trl/reward/think_format", "trl/reward/accuracy",
)  # fmt: skip


class Given:
    """The inputs of one case: flat over sampled tokens, leaves where the case has a gradient."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.options: dict[str, Any] = case["options"]
        base = VECTORS["inputs"]["base"]
        self.mask = torch.tensor(base["response_mask"]).bool()
        self.sequences = Sequences.of_lengths(self.mask.sum(1))
        self.whole = {
            name: torch.tensor(base[ref.removeprefix("base/")], dtype=torch.float64)
            for name, ref in case["inputs"].items()
            if isinstance(ref, str) and ref.startswith("base/")
        }
        for name in case.get("grads") or {}:
            self.whole[name].requires_grad_()
        self.groups = torch.tensor(base["group_index"])
        self.versions = torch.tensor(base["versions"])[self.mask]

    def flat(self, name: str) -> Tensor:
        return self.whole[name][self.mask]

    def advantages(self) -> Tensor:
        given = self.whole["advantages"]
        return self.sequences.spread(given) if given.ndim == 1 else given[self.mask]

    def tokens(self, anchor: str = "old_log_prob", behaviour: str | None = None) -> Tokens:
        return Tokens(
            self.flat("log_prob"), self.flat(anchor), self.flat(behaviour or anchor), self.advantages(), self.sequences
        )

    def weights(self, mode: str, *, num_tokens: int | None = None, **counts: Any) -> Tensor:
        """Aggregation weight of every token; ``counts`` overrides the batch's own denominators."""
        lengths = self.mask.sum(1)
        batch = Denominators(
            num_tokens or int(lengths.sum()),
            counts.get("global_batch_size") or len(lengths),
            counts.get("loss_scale_factor") or self.mask.shape[1],
        )
        by_row = [sequence_weight(mode, int(n), batch) for n in lengths]  # type: ignore[arg-type]
        return self.sequences.spread(torch.tensor(by_row, dtype=torch.float64))

    def total(self, losses: Tensor, mode: str | None = None, **counts: Any) -> Tensor:
        mode = mode or self.options.get("loss_agg_mode", "token-mean")
        return (losses * self.weights(mode, **counts)).sum()

    @property
    def outcomes(self) -> Outcomes:
        return Outcomes(
            self.whole["token_level_rewards"].sum(1), self.groups, self.mask.sum(1), self.whole.get("reward_baselines")
        )

    def per_token(self, by_sequence: Tensor) -> Tensor:
        return self.sequences.spread(by_sequence)


Adapter = Callable[[Given], dict[str, Any]]
ADAPTERS: dict[str, Adapter] = {}


def answers(*patterns: str) -> Callable[[Adapter], Adapter]:
    def register(adapter: Adapter) -> Adapter:
        for pattern in patterns:
            ADAPTERS[pattern] = adapter
        return adapter

    return register


# --- advantages ---------------------------------------------------------------------------------------------------


def _outcome(estimate: Callable[..., Tensor]) -> Adapter:
    def adapter(given: Given) -> dict[str, Any]:
        std = given.options.get("norm_adv_by_std_in_grpo")
        result = given.per_token(estimate(given.outcomes, **({} if std is None else {"normalise_by_std": std})))
        return {"advantages": result} | ({"returns": result} if "returns" in given.case["outputs"] else {})

    return adapter


ADAPTERS |= {
    "verl/adv/grpo-": _outcome(grpo),
    "verl/adv/grpo_vectorized-": _outcome(grpo),
    "verl/adv/grpo_passk-": _outcome(pass_at_k),
    "verl/adv/reinforce_plus_plus_baseline/": _outcome(reinforce_pp_baseline),
    "verl/adv/rloo/": _outcome(rloo),
    "verl/adv/rloo_vectorized/": _outcome(rloo),
    "verl/adv/opo/": _outcome(opo),
    "verl/adv/gpg/": _outcome(gpg),
}


@answers("verl/adv/gae-")
def _gae(given: Given) -> dict[str, Any]:
    found, returns = gae_tokens(
        given.flat("token_level_rewards"), given.flat("values"), given.sequences,
        gamma=given.options["gamma"], lam=given.options["lam"],
    )  # fmt: skip
    return {"advantages": found, "returns": returns}


# --- aggregation --------------------------------------------------------------------------------------------------


@answers("verl/agg/", "verl/agg-global/")
def _aggregation(given: Given) -> dict[str, Any]:
    options = given.options
    loss = given.total(
        given.flat("loss_mat"), num_tokens=options.get("batch_num_tokens"),
        global_batch_size=options.get("global_batch_size"), loss_scale_factor=options.get("loss_scale_factor"),
    )  # fmt: skip
    # verl undoes the averaging over ranks inside the loss, our policy does it outside
    return {"loss": loss * options.get("dp_size", 1)}


# --- policy losses of verl ----------------------------------------------------------------------------------------


def _fraction(flags: Tensor) -> float:
    return flags.double().mean().item()


def _verl(terms: LossTerms, given: Given, *, mode: str | None = None, clipped: bool = True) -> dict[str, Any]:
    info = given.options.get("global_batch_info") or {}
    weights = given.flat("rollout_is_weights") if "rollout_is_weights" in given.whole else 1.0
    loss = given.total(terms.loss * weights, mode, num_tokens=info.get("batch_num_tokens")) * info.get("dp_size", 1)
    metrics = {"actor/pg_clipfrac": _fraction(terms.clipped | terms.dual_clipped)} if clipped else {}
    return {"loss": loss, "metrics": metrics}


@answers("verl/pg/vanilla")
def _vanilla(given: Given) -> dict[str, Any]:
    options = given.options
    terms = ppo_clip(
        given.tokens(), clip_low=options["clip_ratio_low"], clip_high=options["clip_ratio_high"],
        dual_clip=options.get("clip_ratio_c", 3.0),
    )  # fmt: skip
    found = _verl(terms, given, clipped=False)
    return found | {
        "metrics": {
            "actor/pg_clipfrac": _fraction(terms.clipped),
            "actor/pg_clipfrac_lower": _fraction(terms.dual_clipped),
            "actor/ppo_kl": -given.tokens().log_ratio.mean().item(),
        }
    }


def _options(given: Given, names: dict[str, str]) -> dict[str, float]:
    """Return options of ours by what the case calls them, also in its table ``policy_loss``."""
    theirs = {**given.options, **given.options.get("policy_loss", {})}
    return {name: theirs[theirs_name] for name, theirs_name in names.items()}


def _verl_loss(loss: Callable[..., LossTerms], *, clipped: bool = True, **names: str) -> Adapter:
    """Compare a loss; ``names`` are verl's of its options."""
    return lambda given: _verl(loss(given.tokens(), **_options(given, names)), given, clipped=clipped)


def _total(
    loss: Callable[..., LossTerms],
    others: dict[str, Callable[[LossTerms], Any]] | None = None,
    *,
    anchor: str = "old_log_prob",
    mode: str | None = None,
    **names: str,
) -> Adapter:
    """Compare a loss after aggregation, and ``others`` by the names of their outputs."""

    def adapter(given: Given) -> dict[str, Any]:
        terms = loss(given.tokens(anchor), **_options(given, names))
        return {"loss": given.total(terms.loss, mode), **{name: of(terms) for name, of in (others or {}).items()}}

    return adapter


CLIP = {"clip_low": "clip_ratio_low", "clip_high": "clip_ratio_high"}
COV = {"clip_cov_share": "clip_cov_ratio", "clip_cov_low": "clip_cov_lb", "clip_cov_high": "clip_cov_ub"}
ADAPTERS |= {
    "verl/pg/gspo/": _verl_loss(gspo, **CLIP),
    "verl/pg/gspo-wide/": _verl_loss(gspo, **CLIP),
    "verl/pg/gspo-tokadv/": _verl_loss(gspo_token, **CLIP),
    "verl/pg/dro/": _verl_loss(dro, clipped=False, dro_beta="dro_beta"),
    "verl/pg/gpg/": _verl_loss(reinforce, clipped=False),
    "verl/pg/dppo_tv/": _verl_loss(dppo_tv, **CLIP, weight_cap="clip_ratio_c"),
    "verl/pg/dppo_kl/": _verl_loss(dppo_kl, **CLIP, weight_cap="clip_ratio_c"),
    "verl/pg/sapo": _verl_loss(sapo, tau_positive="tau_pos", tau_negative="tau_neg"),
    "verl/pg/clip_cov/": _verl_loss(clip_cov, clipped=False, clip_low="clip_ratio", clip_high="clip_ratio", **COV),
    "verl/pg/kl_cov/": _verl_loss(kl_cov, clipped=False, kl_cov_share="kl_cov_ratio", kl_cov_penalty="ppo_kl_coef"),
}


@answers("verl/pg/cispo")
def _cispo(given: Given) -> dict[str, Any]:
    low, high = given.options["clip_ratio_low"], given.options["clip_ratio_high"]
    return _verl(cispo(given.tokens(), weight_cap=1 + high, floor=1 - low), given, clipped=False)


@answers("verl/pg/geo_mean/", "verl/pg/geo_mean-w/")
def _gmpo(given: Given) -> dict[str, Any]:
    terms = gmpo(given.tokens(), clip_low=given.options["clip_ratio_low"], clip_high=given.options["clip_ratio_high"])
    losses = terms.loss
    if "rollout_is_weights" in given.whole:  # a sequence's weight is the geometric mean of its tokens'
        log_weight = (given.flat("rollout_is_weights") + 1e-10).log()
        losses = losses * given.per_token(given.sequences.mean(log_weight).exp())
    return {"loss": given.total(losses, "seq-mean-token-mean")}


@answers("verl/pg/bypass-")
def _bypass(given: Given) -> dict[str, Any]:
    """Verl's mode without a recomputed policy; its rejection also shrinks the denominator."""
    options = given.options
    tokens = given.tokens()
    keep = torch.ones_like(tokens.current, dtype=torch.bool)
    if options["rollout_rs"]:
        keep = _verl_rejection(tokens.log_ratio, given, options["rollout_rs"], options["rollout_rs_threshold"])
    if options["loss_type"] == "ppo_clip":
        terms = ppo_clip(
            tokens, clip_low=options["clip_ratio_low"], clip_high=options["clip_ratio_high"], dual_clip=3.0
        )
        losses = terms.loss  # the ratio is the importance weight already
    else:
        losses = reinforce(tokens).loss
        if options["rollout_is"]:
            losses = losses * importance_weights(
                tokens.log_ratio, given.sequences, level=options["rollout_is"], bound="truncate",
                high=options["rollout_is_threshold"],
            )  # fmt: skip
    return {"loss": given.total(losses * keep, num_tokens=int(keep.sum())), "metrics": {}}


# --- value, KL, entropy, whitening --------------------------------------------------------------------------------


@answers("verl/value/")
def _verl_value(given: Given) -> dict[str, Any]:
    clip = given.options["cliprange_value"]
    values, old, returns = given.flat("vpreds"), given.flat("values"), given.flat("returns")
    losses = value_loss(values, old, returns, clip=clip)
    moved = 0.5 * (values.clamp(old - clip, old + clip) - returns).square() > 0.5 * (values - returns).square()
    return {"loss": given.total(losses), "clipfrac": _fraction(moved)}


def _value(clip: str, form: str = "") -> Adapter:
    def adapter(given: Given) -> dict[str, Any]:
        values, old, returns = (given.flat(name) for name in ("vpreds", "values", "returns"))
        form_ = {"form": given.options[form]} if form else {}
        return {"loss": given.total(value_loss(values, old, returns, clip=given.options[clip], **form_))}

    return adapter


ADAPTERS |= {"areal/value/": _value("value_eps_clip", "loss_fn_type"), "openrlhf/value/": _value("clip_eps")}


@answers("verl/kl/")
def _verl_kl(given: Given) -> dict[str, Any]:
    form = given.options["kl_penalty"]
    value = kl_.kl_estimate(given.whole["logprob"], given.whole["ref_logprob"], KL_ALIASES.get(form, form))
    return {"kl": value}


@answers("openrlhf/kl/")
def _openrlhf_kl(given: Given) -> dict[str, Any]:
    value = kl_.kl_estimate(given.whole["log_probs"], given.whole["log_probs_base"], given.options["kl_estimator"])
    return {"kl": value}


@answers("slime/kl/unbiased-k3")
def _slime_kl(given: Given) -> dict[str, Any]:
    ratio = (given.whole["log_probs"] - given.whole["old_log_prob"]).exp()
    value = ratio * kl_.kl_estimate(given.whole["log_probs"], given.whole["log_probs_base"], "k3")
    return {"kl": value}


@answers("verl/entropy/")
def _entropy(given: Given) -> dict[str, Any]:
    return {"loss": given.total(kl_.entropy(given.whole["logits"])[given.mask])}


@answers("verl/entropy_from_logits/")
def _entropy_from_logits(given: Given) -> dict[str, Any]:
    return {"entropy": kl_.entropy(given.whole["logits"])}


@answers("torch/sft/")
def _torch_sft(given: Given) -> dict[str, Any]:
    labels = given.whole["labels"].long()
    chosen = given.whole["logits"].log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    return {"loss": given.total(-chosen[given.mask], "token-mean")}


@answers("openrlhf/sft/")
def _openrlhf_sft(given: Given) -> dict[str, Any]:
    mode = "token-mean" if given.options["token_level_loss"] else "seq-mean-token-mean"
    return {"loss": given.total(-given.flat("log_prob"), mode)}


@answers("verl/masked_whiten-")
def _whiten(given: Given) -> dict[str, Any]:
    return {"whitened": shape.whiten(given.flat("values"), shift=given.options["shift_mean"])}


@answers("areal/masked_normalization/")
def _areal_whiten(given: Given) -> dict[str, Any]:
    """AReaL divides by the biased standard deviation plus 1e-5, Penstock by the unbiased one."""
    values = given.flat("x")
    num, variance = len(values), values.var().item()
    theirs = math.sqrt(variance * (num - 1) / num) + 1e-5
    return {"out": shape.whiten(values) * math.sqrt(variance + 1e-8) / theirs}


@answers("verl/compute_rewards")
def _compute_rewards(given: Given) -> dict[str, Any]:
    scores = given.whole["token_level_scores"].sum(1)
    kl = kl_.kl_estimate(given.flat("old_log_prob"), given.flat("ref_log_prob"), "k1")
    return {"rewards": shape.kl_in_reward(scores, kl, given.sequences, coefficient=given.options["kl_ratio"])}


@answers("verl/adaptive_kl/")
def _adaptive_kl(given: Given) -> dict[str, Any]:
    options = given.options
    controller = kl_.KlController(options["init_kl_coef"], options["target_kl"], options["horizon"])
    values = []
    for kl, num_samples in options["updates"]:
        controller.update(kl, num_samples)
        values.append(controller.coefficient)
    return {"values": values}


def importance_weights(
    log_ratio: Tensor, sequences: Sequences, *, level: str, bound: str, high: float, low: float = 0.0
) -> Tensor:
    rule = importance.bind(importance=level, importance_bound=bound, importance_high=high, importance_low=low)
    return rule(drift_of(log_ratio, sequences))


# --- corrections --------------------------------------------------------------------------------------------------


def _band(threshold: float | str) -> tuple[float | None, float]:
    """Read verl's threshold: an upper bound, or 'low_high'."""
    if isinstance(threshold, str) and "_" in threshold:
        low, high = threshold.split("_")
        return float(low), float(high)
    return None, float(threshold)


def _verl_rejection(log_ratio: Tensor, given: Given, statistics: str, thresholds: float | str) -> Tensor:
    names, bounds = statistics.split(","), str(thresholds).split(",")
    keep = torch.ones_like(log_ratio, dtype=torch.bool)
    for name, bound in zip(names, bounds, strict=True):
        low, high = _band(bound)
        keep &= rejection(drift_of(log_ratio, given.sequences), rejection=name, rejection_high=high, rejection_low=low)  # type: ignore[arg-type]
    return keep


@answers("verl/is/")
def _verl_is(given: Given) -> dict[str, Any]:
    options = given.options
    low, high = _band(options["rollout_is_threshold"])
    log_ratio = given.flat("old_log_prob") - given.flat("rollout_log_prob")
    weights = importance_weights(
        log_ratio, given.sequences, level=options["rollout_is"], bound="truncate" if low is None else "mask",
        low=low or 0.0, high=high,
    )  # fmt: skip
    if options["rollout_is_batch_normalize"]:  # which Penstock does not offer
        by_token = options["rollout_is"] == "token"
        weights = weights / (weights if by_token else given.sequences.mean(weights)).mean()
    return {"weights": weights, "metrics": {}}


@answers("verl/rs/")
def _verl_rs(given: Given) -> dict[str, Any]:
    log_ratio = given.flat("old_log_prob") - given.flat("rollout_log_prob")
    options = given.options
    return {
        "mask": _verl_rejection(log_ratio, given, options["rollout_rs"], options["rollout_rs_threshold"]).double(),
        "metrics": {},
    }


@answers("verl/offpolicy_metrics/")
def _offpolicy_metrics(given: Given) -> dict[str, Any]:
    ages = torch.ones(int(given.mask.sum()))
    about = (given.flat("old_log_prob"), given.flat("rollout_log_prob"), ages, given.sequences)
    sums, maxima = ({name: float(value) for name, value in found.items()} for found in mismatch_figures(*about))
    ours = mismatch_metrics({**sums, "tokens": len(ages)}, maxima)
    theirs = {
        "training_ppl": "perplexity",
        "training_log_ppl": "log_perplexity",
        "kl": "kl_behaviour_k1",
        "k3_kl": "kl_behaviour",
        "rollout_ppl": "perplexity_behaviour",
        "rollout_log_ppl": "log_perplexity_behaviour",
        "log_ppl_diff": "perplexity_gap",
        "log_ppl_abs_diff": "perplexity_gap_abs",
        "log_ppl_diff_max": "perplexity_gap_max",
        "log_ppl_diff_min": "perplexity_gap_min",
        "ppl_ratio": "perplexity_ratio",
        "chi2_token": "chi2_token",
        "chi2_seq": "chi2_sequence",
    }
    return {"metrics": {name: ours[mine] for name, mine in theirs.items()}}


@answers("slime/mis/")
def _slime_mis(given: Given) -> dict[str, Any]:
    options = given.options
    log_ratio = given.flat("old_log_prob") - given.flat("rollout_log_prob")
    low, high = options["tis_lower_bound"], options["tis_upper_bound"]
    unbounded = log_weights(log_ratio, given.sequences, options["tis_level"]).exp()
    keep = torch.ones_like(log_ratio, dtype=torch.bool)
    if options["tis_mode"] == "mask":  # slime rejects by mask and leaves the weight
        weights = unbounded
        keep &= importance_weights(
            log_ratio, given.sequences, level=options["tis_level"], bound="mask", low=low, high=high
        ) > 0  # fmt: skip
    else:
        weights = importance_weights(
            log_ratio, given.sequences, level=options["tis_level"], bound=options["tis_mode"], low=low, high=high
        )
    if options["use_rs"]:
        keep &= importance_weights(
            log_ratio, given.sequences, level=options["rs_level"], bound="mask", low=low, high=high
        ) > 0  # fmt: skip
        keep &= veto(drift_of(log_ratio, given.sequences), veto=options["rs_veto_threshold"])
    return {"flat_weights": weights, "flat_mask": keep.double()}


@answers("slime/opsm/")
def _slime_opsm(given: Given) -> dict[str, Any]:
    log_ratio = given.flat("log_prob") - given.flat("old_log_prob")
    keep = opsm(drift_of(log_ratio, given.sequences, given.advantages()), opsm_delta=given.options["opsm_delta"])
    return {"flat_mask": keep.double()}


@answers("areal/m2po_mask/")
def _areal_m2po(given: Given) -> dict[str, Any]:
    log_ratio = given.flat("prox_logp") - given.flat("old_logp")
    squares = log_ratio.square()
    return {"mask": (squares <= m2po_limit(squares, given.options["m2_threshold"])).double()}


@answers("formula/ess/", "formula/ess-token/")
def _ess(given: Given) -> dict[str, Any]:
    log_ratio = given.flat("log_prob") - given.flat("rollout_log_prob")
    by_token = given.options["level"] == "token"
    weights = (log_ratio if by_token else given.sequences.sum(log_ratio)).exp()
    share = float(weights.sum().square() / (len(weights) * weights.square().sum()))
    return {"ess_ratio": share} if by_token else {"ess_ratio": share, "lr_scale": learning_rate_factor(share)}


@answers("formula/dynamic-sampling/")
def _dynamic_sampling(given: Given) -> dict[str, Any]:
    def kept(name: str) -> list[int]:
        return [int(g) for g in given.groups.unique() if rewards_differ(given.whole[name][given.groups == g].tolist())]

    return {"kept_groups_graded": kept("scores"), "kept_groups_binary": kept("scores_binary")}


# --- TRL ----------------------------------------------------------------------------------------------------------

_TRL_MODES = {
    "grpo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "luspo": "seq-mean-token-mean",
    "bnpo": "token-mean", "dapo": "token-mean", "cispo": "token-mean", "vespo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}  # fmt: skip


def _trl_terms(given: Given, tokens: Tokens) -> LossTerms:
    options = given.options
    match options["loss_type"]:
        case "cispo":
            return cispo(tokens, weight_cap=options["epsilon_high"])
        case "sapo":
            return sapo(
                tokens, tau_positive=options["sapo_temperature_pos"], tau_negative=options["sapo_temperature_neg"]
            )
        case "vespo":
            shape_ = options["vespo"]
            return vespo(
                tokens, vespo_k_positive=shape_["k_pos"], vespo_lambda_positive=shape_["lambda_pos"],
                vespo_k_negative=shape_["k_neg"], vespo_lambda_negative=shape_["lambda_neg"],
            )  # fmt: skip
    clip = {"clip_low": options["epsilon"], "clip_high": options["epsilon_high"]}
    if options["importance_sampling_level"] == "sequence":
        return (luspo if options["loss_type"] == "luspo" else gspo)(tokens, **clip)
    return ppo_clip(tokens, **clip, dual_clip=options["delta"])


@answers("trl/grpo/")
def _trl(given: Given) -> dict[str, Any]:
    options, tokens = given.options, given.tokens()
    terms = _trl_terms(given, tokens)
    losses = terms.loss
    if options["off_policy_mask_threshold"] is not None:  # TRL holds it against the engine's log-probabilities
        log_ratio = tokens.current - given.flat("rollout_log_prob")
        losses = losses * opsm(
            drift_of(log_ratio, given.sequences, tokens.advantages), opsm_delta=options["off_policy_mask_threshold"]
        )
    if options["vllm_is"]:
        name, low, high = options["vllm_is"]
        level, bound = name.split("_")
        losses = losses * importance_weights(
            tokens.anchor - given.flat("rollout_log_prob"), given.sequences,
            level=level, bound=bound, low=low or 0.0, high=high,
        )  # fmt: skip
    kl_mean = None
    if options["beta"]:
        penalty = kl_.kl_estimate(tokens.current, given.flat("ref_log_prob"), "k3")
        if options["use_bias_correction_kl"]:
            of_sequence = options["importance_sampling_level"] == "sequence"
            log_ratio = given.per_token(tokens.sequence_log_ratio) if of_sequence else tokens.log_ratio
            penalty = penalty * log_ratio.exp()
        kl_mean = penalty.mean().item()
        losses = losses + options["beta"] * penalty
    metrics = {} if kl_mean is None else {"kl": kl_mean}
    bonus = options["entropy_coef"] * given.total(given.flat("entropy"), "token-mean")  # in every mode
    return {"loss": given.total(losses, _TRL_MODES[options["loss_type"]]) - bonus, "metrics": metrics}


@answers("trl/rloo/seqclip/")
def _trl_rloo(given: Given) -> dict[str, Any]:
    terms = product_clip(given.tokens(), clip_low=given.options["epsilon"], clip_high=given.options["epsilon_high"])
    return {"loss": given.total(terms.loss, "seq-mean-token-mean")}


def _preferences(chosen: Tensor, rejected: Tensor, *, kl: float = 0.0) -> Pairs:
    """Return pairs whose reference has log-probability 0, of answers of one token each."""
    zeros, ones = torch.zeros_like(chosen), torch.ones_like(chosen)
    return Pairs(chosen, rejected, zeros, zeros, ones, ones, chosen_nll=zeros, kl=kl)


@answers("trl/kto/")
def _trl_kto(given: Given) -> dict[str, Any]:
    """TRL's answers have one label each: here a row whose other answer has no tokens or, for APO, adds nothing."""
    options = given.options
    margins = given.sequences.sum(given.flat("log_prob") - given.flat("ref_log_prob"))
    label = torch.tensor(options["label"]).bool()
    never = torch.full_like(margins, 1e9)
    weights = options["desirable_weight"], options["undesirable_weight"]
    kl = max(0.0, options["KL_logps"] - options["ref_KL_logps"])
    if options["loss_type"] == "kto":
        both = _preferences(margins, margins, kl=kl)
        one = replace(both, chosen_tokens=label.double(), rejected_tokens=(~label).double())
        found = kto(one, beta=options["beta"], desirable_weight=weights[0], undesirable_weight=weights[1])
        return {"loss": found.mean()}
    good = weights[0] * apo_zero(_preferences(margins, -never), beta=options["beta"])
    bad = weights[1] * apo_zero(_preferences(never, margins), beta=options["beta"])
    return {"loss": torch.where(label, good, bad).mean()}


@answers("trl/orpo/")
def _trl_orpo(given: Given) -> dict[str, Any]:
    means = given.sequences.mean(given.flat("log_prob"))
    return {"loss": orpo(_preferences(means[:4], means[4:]), beta=given.options["beta"]).mean()}


@answers("trl/cpo/")
def _trl_cpo(given: Given) -> dict[str, Any]:
    """TRL takes means over tokens for SimPO, sums for the others."""
    options = given.options
    form = options["loss_type"]
    combine = given.sequences.mean if form == "simpo" else given.sequences.sum
    answers_ = combine(given.flat("log_prob"))
    pairs, beta = _preferences(answers_[:4], answers_[4:]), options["beta"]
    match form:
        case "simpo":
            losses = simpo(pairs, beta=beta, simpo_gamma=options["simpo_gamma"])
        case "ipo":
            losses = ipo(pairs, beta=beta, ipo_length="sum")
        case "hinge":
            losses = hinge(pairs, beta=beta)
        case _:
            losses = cpo(pairs, beta=beta, cpo_nll=1.0)
    return {"loss": losses.mean()}


def _overlong(given: Given, longest: str, buffer: str, factor: str = "") -> Tensor:
    inputs, options = given.case["inputs"], given.options
    return shape.overlong_penalty(
        torch.tensor(inputs.get("response_lengths", inputs.get("lengths"))), longest=options[longest],
        buffer=options[buffer], factor=options.get(factor, 1.0),
    )  # fmt: skip


@answers("trl/reward/soft_overlong/")
def _trl_overlong(given: Given) -> dict[str, Any]:
    return {"rewards": _overlong(given, "max_completion_len", "soft_punish_cache")}


@answers("verl/dapo_overlong/")
def _verl_overlong(given: Given) -> dict[str, Any]:
    penalty = _overlong(given, "max_resp_len", "overlong_buffer_len", "penalty_factor")
    return {"overlong_reward": penalty, "reward": given.options["base_score"] + penalty}


@answers("areal/overlong")
def _areal_overlong(given: Given) -> dict[str, Any]:
    penalty = _overlong(given, "max_response_length", "overlong_tokens", "overlong_penalty_factor")
    return {"reward": 1.0 + penalty}


# --- AReaL, OpenRLHF ----------------------------------------------------------------------------------------------


def _areal_weights(given: Given, rule: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Weights and the tokens they keep; AReaL's k3 is exp(-x) - 1 + x of x = log(proximal / behaviour)."""
    log_ratio = given.flat("old_log_prob") - given.flat("rollout_log_prob")
    if rule["metric"] != "ratio":
        keep = rejection(drift_of(-log_ratio, given.sequences), rejection="seq_mean_k3", rejection_high=rule["upper"])
        return log_ratio.exp() * keep, keep
    weights = importance_weights(
        log_ratio, given.sequences, level="geometric" if rule["level"] == "sequence" else "token",
        bound="truncate" if rule["action"] == "clamp" else "mask",
        low=rule.get("lower") or 0.0, high=rule["upper"],
    )  # fmt: skip
    return weights, weights > 0


@answers("areal/ppo/")
def _areal(given: Given) -> dict[str, Any]:
    """AReaL takes rejected tokens out before it averages a sequence's ratio, and divides by all tokens."""
    options, tokens = given.options, given.tokens()
    clip = {
        "clip_low": options["eps_clip"], "clip_high": options.get("eps_clip_higher") or options["eps_clip"],
        "dual_clip": options.get("c_clip"),
    }  # fmt: skip
    weights = torch.ones_like(tokens.advantages)
    keep = torch.ones_like(weights, dtype=torch.bool)
    found: dict[str, Any] = {}
    if options["rejection_sampling"]:
        weights, keep = _areal_weights(given, options["rejection_sampling"])
        found["behave_imp_weight"] = weights
    kept = Tokens(
        tokens.current[keep], tokens.anchor[keep], tokens.behaviour[keep], tokens.advantages[keep],
        Sequences(given.sequences.index[keep], given.sequences.count),
    )  # fmt: skip
    terms = gspo(kept, **clip) if options["importance_sampling_level"] == "sequence" else ppo_clip(kept, **clip)
    found["clip_mask"], found["dual_clip_mask"] = torch.zeros(2, len(keep), dtype=torch.bool)
    found["clip_mask"][keep], found["dual_clip_mask"][keep] = terms.clipped, terms.dual_clipped
    loss = (terms.loss * weights[keep]).sum() / len(keep)
    return {"loss": loss} | found


@answers("areal/dpo/")
def _areal_dpo(given: Given) -> dict[str, Any]:
    margins = torch.tensor(given.case["inputs"]["logits"], dtype=torch.float64)
    pairs, beta = _preferences(margins, torch.zeros_like(margins)), given.options["beta"]
    is_ipo = given.case["id"].endswith("/ipo")
    return {"loss": ipo(pairs, beta=beta, ipo_length="sum") if is_ipo else sigmoid(pairs, beta=beta)}


@answers("openrlhf/dpo/")
def _openrlhf_dpo(given: Given) -> dict[str, Any]:
    options = given.options
    margins = given.sequences.sum(given.flat("log_prob") - given.flat("ref_log_prob"))
    pairs, beta = _preferences(margins[:4], margins[4:]), options["beta"]
    losses = (
        ipo(pairs, beta=beta, ipo_length="sum")
        if options.get("ipo")
        else sigmoid(pairs, beta=beta, label_smoothing=options.get("label_smoothing", 0.0))
    )
    rewards = options["beta"] * margins.detach()
    return {"loss": losses.mean(), "chosen_rewards": rewards[:4], "rejected_rewards": rewards[4:]}


def _openrlhf_weights(given: Given) -> tuple[Tensor, Tensor]:
    """Weights of OpenRLHF's importance-sampling correction, and its filtered tokens."""
    options = given.options
    proximal, behaviour = given.flat("old_log_prob"), given.flat("rollout_log_prob")
    log_ratio = proximal - behaviour
    low, high = options["is_correction_threshold"]
    gating = options.get("is_correction_gating", "ratio")
    mine, theirs = proximal.exp().clamp(1e-8, 1 - 1e-8), behaviour.exp().clamp(1e-8, 1 - 1e-8)
    statistic = {
        "ratio": log_ratio,
        "binary_kl": theirs * (theirs / mine).log() + (1.0 - theirs) * ((1.0 - theirs) / (1.0 - mine)).log(),
        "tv": (proximal.exp() - behaviour.exp()).abs(),
    }[gating]
    if options["is_correction_level"] == "seq":
        statistic = given.per_token(given.sequences.mean(statistic))
    statistic = statistic.exp() if gating == "ratio" else statistic
    outside = (statistic < low) | (statistic > high)
    if options.get("is_correction_mode") == "clip":
        return log_ratio.exp().clamp(low, high), outside
    return log_ratio.exp() * ~outside, outside


@answers("openrlhf/policy/")
def _openrlhf(given: Given) -> dict[str, Any]:
    options = given.options
    clip = {"clip_low": options["clip_eps_low"], "clip_high": options["clip_eps_high"]}
    of_sequence = options.get("policy_loss_type") == "gspo"
    terms = (
        gspo(given.tokens(), **clip)
        if of_sequence
        else ppo_clip(given.tokens(), **clip, dual_clip=options["dual_clip"])
    )
    mode = "token-mean" if options["token_level_loss"] and not of_sequence else "seq-mean-token-mean"
    losses, found = terms.loss, {}
    if "is_correction_level" in options:
        weights, outside = _openrlhf_weights(given)
        losses = losses * weights
        by_sequence = options["is_correction_level"] == "seq"
        filtered = given.sequences.mean(outside.double()) if by_sequence else outside.double()
        found = {
            "is_filter_ratio": filtered.mean().item(),
            "vllm_kl": (given.flat("rollout_log_prob") - given.flat("old_log_prob")).mean().item(),
        }
    return {
        "loss": given.total(losses, mode),
        "clip_ratio": _fraction(terms.clipped),
        "ppo_kl": -given.tokens().log_ratio.mean().item(),
    } | found


# --- closed forms and single functions ----------------------------------------------------------------------------


@answers("formula/minirl-")
def _minirl(given: Given) -> dict[str, Any]:
    options = given.options
    tokens = given.tokens(behaviour="rollout_log_prob")
    terms = minirl(tokens, clip_low=options["eps_low"], clip_high=options["eps_high"], weight_cap=options["tis_cap"])
    weight = (tokens.current - tokens.behaviour).detach().exp().clamp(max=options["tis_cap"])
    return {"loss": given.total(terms.loss), "M": (~terms.clipped).double(), "w": weight}


@answers("formula/topr-traj/")
def _topr(given: Given) -> dict[str, Any]:
    low, high = given.options["neg_clip"]
    advantages = given.per_token(2 * given.whole["scores"] - 1)
    tokens = Tokens(
        given.flat("log_prob"),
        given.flat("rollout_log_prob"),
        given.flat("rollout_log_prob"),
        advantages,
        given.sequences,
    )
    terms = topr(tokens, floor=low, weight_cap=high)
    held = torch.where(advantages < 0, terms.ratio.clamp(low, high), torch.ones_like(advantages))
    return {"loss": given.total(terms.loss, "seq-mean-token-sum"), "weight": given.sequences.mean(held)}


@answers("formula/cispo-behaviour/")
def _cispo_behaviour(given: Given) -> dict[str, Any]:
    terms = cispo(given.tokens("rollout_log_prob"), weight_cap=given.options["cap"])
    return {"loss": given.total(terms.loss, "token-mean")}


_DECOUPLED = {
    "tis2": ("token", "truncate", 0.0, 2.0),
    "icepop0.5-5": ("token", "mask", 0.5, 5.0),
    "seqtis2": ("sequence", "truncate", 0.0, 2.0),
    "seqmis2": ("sequence", "mask", 0.0, 2.0),
    "geomis": ("geometric", "mask", 0.95, 1.05),
}


@answers("formula/decoupled-")
def _decoupled(given: Given) -> dict[str, Any]:
    low, high = given.options["clip"]
    terms = ppo_clip(given.tokens(), clip_low=low, clip_high=high)
    log_ratio = given.flat("old_log_prob") - given.flat("rollout_log_prob")
    name = given.options["weight"]
    level, bound, lowest, highest = _DECOUPLED[name]
    weights = importance_weights(
        log_ratio, given.sequences, level=level, bound=bound, low=lowest, high=highest  # type: ignore[arg-type]
    )  # fmt: skip
    if name == "geomis":  # a filter alone
        weights = (weights > 0).double()
    return {"loss": given.total(terms.loss * weights, "token-mean"), "w": weights}


@answers("formula/agentrl-")
def _agentrl(given: Given) -> dict[str, Any]:
    """AgentRL's ratio is to the sampler, its MiniRL has no cap but the band; it divides by the tokens it keeps."""
    options = given.options
    upper = options["epsilon"] + options["epsilon_higher"]
    tokens = given.tokens("rollout_log_prob")
    ratio = tokens.log_ratio.detach().exp()
    created = given.per_token(torch.tensor(VECTORS["inputs"]["base"]["versions"])[:, 0])
    age = (options["current_step"] - created).to(ratio.dtype) if "current_step" in options else torch.zeros_like(ratio)
    keep = age_band(
        drift_of(tokens.log_ratio, tokens.sequences, tokens.advantages, age), clip_low=options["epsilon"], clip_high=upper,
        age_band_cap=1.0 if options.get("strict_in_bound") else options["importance_weight_cap_ratio"],
        age_band_decay=options.get("out_of_date_decay", 0.0),
    )  # fmt: skip
    if "minirl" in given.case["id"]:
        losses = cispo(tokens, weight_cap=math.inf).loss
    else:
        losses = ppo_clip(tokens, clip_low=options["epsilon"], clip_high=upper).loss
    return {"loss": given.total(losses * keep, "token-mean", num_tokens=int(keep.sum())), "kept": keep.double()}


@answers("formula/roll-dualclip/")
def _roll_dual_clip(given: Given) -> dict[str, Any]:
    clip = given.options["pg_clip"]
    terms = ppo_clip(given.tokens(), clip_low=clip, clip_high=clip, dual_clip=1 + 2 * clip)
    return {"loss": given.total(terms.loss, "token-mean")}


ADAPTERS |= {
    "areal/sapo/": _total(sapo, mode="token-mean", tau_positive="tau_pos", tau_negative="tau_neg"),
    "ce-gppo/": _total(
        ce_gppo, {"clipfrac": lambda terms: _fraction(terms.clipped)}, clip_low="cliprange_low",
        clip_high="cliprange_high", beta_low="beta1", beta_high="beta2", dual_clip="clip_ratio_c",
    ),
    "formula/double-sided-is/": _total(
        double_sided, {"weight": lambda terms: terms.ratio * ~terms.clipped}, anchor="rollout_log_prob",
        clip_low="eps_low", clip_high="eps_high",
    ),
    "prime-rl/default/": _total(
        dppo_tv_ratio, anchor="rollout_log_prob", mode="token-mean", clip_low="dppo_mask_low",
        clip_high="dppo_mask_high", tv_drift="kl_tau",
    ),
}  # fmt: skip


# --- the test -----------------------------------------------------------------------------------------------------


def _adapter(case_id: str) -> Adapter | None:
    prefixes = [prefix for prefix in ADAPTERS if case_id.startswith(prefix)]
    return ADAPTERS[max(prefixes, key=len)] if prefixes else None


def _same(found: Any, expected: Any, given: Given, *, loose: bool, name: str) -> None:
    if isinstance(expected, dict):
        for key, value in found.items():  # of their diagnostics we hold those that we report too
            _same(value, expected[key], given, loose=loose, name=f"{name}.{key}")
        return
    if expected is None:
        return
    found = torch.as_tensor(found, dtype=torch.float64)
    expected = torch.tensor(expected, dtype=torch.float64)
    if expected.ndim == 2 and found.ndim == 1:
        expected = expected[given.mask]
    rtol, atol = (2e-5, 2e-6) if loose else (1e-6, 1e-8)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=lambda text: f"{name}: {text}")


RUN = [i for i in CASES if i not in DISAGREEMENTS and i not in NOT_OFFERED and i not in OTHER_RULES]


@pytest.mark.parametrize("case_id", RUN)
def test_equals_the_public_implementation(case_id: str) -> None:
    case = CASES[case_id]
    adapter = _adapter(case_id)
    assert adapter is not None, f"no function of ours answers for {case_id}"
    given = Given(case)
    found = adapter(given)
    loose = "float32" in (case["note"] or "") or ("trl/" in case_id and "orpo" in case_id)
    missing = set(case["outputs"]) - set(found) - {"metrics"}
    assert not [name for name in missing if case["outputs"][name] is not None], missing
    for name, value in found.items():
        detached = value.detach() if isinstance(value, Tensor) else value
        _same(detached, case["outputs"][name], given, loose=loose, name=name)
    if case["grads"]:
        first = found[next(iter(case["outputs"]))]
        first.sum().backward()
        for name, expected in case["grads"].items():
            grad = given.whole[name].grad
            assert grad is not None
            rtol, atol = (2e-5, 2e-6) if loose else (1e-6, 1e-8)
            torch.testing.assert_close(grad, torch.tensor(expected, dtype=torch.float64), rtol=rtol, atol=atol)


def test_every_case_is_accounted_for() -> None:
    """347 cases: each is run here, or listed with the choice made here, or is a rule for rewards."""
    assert len(CASES) == 347
    assert set(DISAGREEMENTS) | set(NOT_OFFERED) | set(OTHER_RULES) <= set(CASES)
    assert len(RUN) + len(DISAGREEMENTS) + len(NOT_OFFERED) + len(OTHER_RULES) == len(CASES)
    assert len(DISAGREEMENTS) == 4
    page = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
    assert [case_id for case_id in DISAGREEMENTS if f"`{case_id}`" not in page] == []
    judged = (Path(__file__).parents[2] / "reward_service" / "rewards" / "test_reward_conformance.py").read_text()
    assert [case_id for case_id in OTHER_RULES if f'"{case_id}"' not in judged] == []
