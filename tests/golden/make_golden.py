"""Write ``losses.json`` and ``in_trainer.json`` from the numpy reference alone.

Invariant: the product is not imported; the values are what the formulas give. A test runs
this again and compares. Run ``python tests/golden/make_golden.py`` after a new case.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import reference_advantages as adv
import reference_losses as ref

HERE = Path(__file__).parent
MODES = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "dr-grpo",
)

LOGPROB = [
    [-0.5, -1.2, -0.3, -2.0, -0.7],
    [-0.9, -0.1, -1.5, -0.4, -0.6],
    [-1.1, -0.8, -0.2, -0.3, -1.9],
    [-0.6, -0.25, -1.4, -0.05, -0.35],
]
LOG_RATIO = [
    [0.1, -0.3, 0.5, 1.5, -0.05],
    [0.0, 0.25, -0.6, -0.15, 0.3],
    [-1.2, 0.05, 0.4, -0.02, 0.18],
    [0.002, -0.001, 0.0005, 0.0001, -0.0003],
]
REF_LOG_RATIO = [
    [0.2, -0.1, 0.3, 0.4, -0.2],
    [-0.3, 0.1, -0.2, 0.05, 0.6],
    [0.5, -0.4, 0.1, 0.25, 0.3],
    [-0.1, 0.15, 0.35, -0.45, 0.02],
]
ADVANTAGES = [
    [1.0, 1.0, -0.5, -1.0, 0.8],
    [-0.7, 0.0, -1.2, 0.4, 0.9],
    [1.1, -0.3, 0.6, -0.6, 0.2],
    [0.5, -1.5, 1.3, -0.2, 0.7],
]
MASK = [[1, 1, 0, 1, 1], [1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]
EXPERT_ROWS = [0, 1, 0, 1]

lp, mask = np.array(LOGPROB), np.array(MASK, dtype=bool)
old, ref_lp = lp - np.array(LOG_RATIO), lp - np.array(REF_LOG_RATIO)
advantages = np.array(ADVANTAGES)
of_row = ref.row_ratio(lp, old, mask)
expert = mask & np.array(EXPERT_ROWS, dtype=bool)[:, None]


def over_tokens(function, keep=mask):
    """Loss and slope of every kept token; ``function(i, t)``."""
    losses, slopes = np.zeros(mask.shape), np.zeros(mask.shape)
    for i, t in zip(*np.nonzero(keep), strict=True):
        losses[i, t], slopes[i, t] = function(i, t)
    return losses, slopes


def case(loss, formula, source, function, mode="token-mean", metrics=None, **args):
    losses, slopes = over_tokens(function)
    w = ref.weights(mask, mode)
    return entry(loss, args, mode, formula, source, (w * losses).sum(), w * slopes, metrics or {})


def entry(loss, args, mode, formula, source, value, gradient, metrics):
    return {
        "loss": loss,
        "args": args,
        "mode": mode,
        "formula": formula,
        "source": source,
        "value": round(float(value), 9),
        "metrics": {k: round(float(v), 9) for k, v in metrics.items()},
        "gradient": np.round(gradient, 9).tolist(),
    }


def token_mean(condition):
    return np.mean([condition(i, t) for i, t in zip(*np.nonzero(mask), strict=True)])


def at(function, **args):
    """``function`` at a token, with its log-prob, old log-prob and advantage."""
    return lambda i, t: function(lp[i, t], old[i, t], advantages[i, t], **args)


def rho(i, t):
    return math.exp(lp[i, t] - old[i, t])


MEAN_KL = token_mean(lambda i, t: old[i, t] - lp[i, t])
MEAN_RATIO = token_mean(rho)


def ppo_cases():
    formula, source = "-min(rA, clip(r)A), dual clip", "arXiv 1707.06347, 1912.09729"
    clipped = token_mean(
        lambda i, t: (
            -advantages[i, t] * ref.clip(rho(i, t), 0.8, 1.2) > -advantages[i, t] * rho(i, t)
        )
    )
    lower = token_mean(lambda i, t: advantages[i, t] < 0 and rho(i, t) > 3)
    metrics = {"pg_clipfrac": clipped, "pg_clipfrac_lower": lower, "ppo_kl": MEAN_KL}
    for mode in MODES:
        yield case("ppo", formula, source, at(ref.ppo), mode, metrics if mode == MODES[0] else {})
    higher = at(ref.ppo, high=0.28)
    yield case(
        "ppo",
        "clip-higher",
        "arXiv 2503.14476",
        higher,
        clip_range_low=0.2,
        clip_range_high=0.28,
    )
    yield case("ppo", "no dual clip", source, at(ref.ppo, dual=None), clip_ratio_c=None)
    yield case(
        "ppo",
        "policy gradient: the ratio is 1 in value",
        "REINFORCE",
        lambda i, t: (-advantages[i, t], -advantages[i, t]),
        fallback_to_policy_gradient=True,
    )
    row_kl = [(old[i] - lp[i])[mask[i]].mean() for i in range(4)]

    def masked(i, t):
        drop = row_kl[i] > 0.1 and advantages[i, t] < 0
        return (0.0, 0.0) if drop else at(ref.ppo)(i, t)

    dropped = token_mean(lambda i, t: row_kl[i] > 0.1 and advantages[i, t] < 0)
    yield case(
        "ppo",
        "rows with mean KL > .1 lose their negative tokens",
        "arXiv 2512.02556",
        masked,
        metrics={"seq_mask/masked_tokens": dropped, "seq_mask/mean_sequence_kl": np.mean(row_kl)},
        enable_sequence_masking=True,
    )


def ratio_cases():
    yield case(
        "importance_sampling",
        "-A r",
        "importance sampling",
        at(ref.importance_sampling),
        metrics={"ratio/mean": MEAN_RATIO, "approx_kl": MEAN_KL},
    )
    for args in ({}, {"tau_pos": 2.0, "tau_neg": 4.0}):
        yield case(
            "sapo",
            "-A (4/tau) sigmoid(tau (r-1)), gradient through the gate",
            "arXiv 2511.20347",
            at(ref.sapo, **args),
            metrics={
                "avg_ratio": MEAN_RATIO,
                "pos_adv_frac": token_mean(lambda i, t: advantages[i, t] > 0),
            },
            **args,
        )
    for epsilon in (0.3, 0.1):
        inside = token_mean(lambda i, t, e=epsilon: 1 / (1 + e) <= rho(i, t) <= 1 + e)
        yield case(
            "sppo",
            "-A log r inside [1/(1+e), 1+e]",
            "arXiv 2108.05828",
            at(ref.sppo, epsilon=epsilon),
            metrics={"pg_clipfrac": 1 - inside},
            epsilon=epsilon,
        )


def weighted_cases():
    formula = "-sg(clip(r)) A log p"
    yield case("cispo", formula, "arXiv 2506.13585", at(ref.cispo), metrics={"unmasked_frac": 1.0})
    yield case("cispo", formula, "arXiv 2506.13585", at(ref.cispo, high=4.0), ratio_cap=5.0)
    yield case(
        "cispo",
        formula + ", masked",
        "arXiv 2506.13585",
        at(ref.cispo, mask_clip=True, mask_low=0.2, mask_high=0.2),
        enable_mask_clip=True,
        mask_clip_range_low=0.2,
        mask_clip_range_high=0.2,
    )
    product = ref.row_product(lp, old, mask)
    for threshold, level in ((0.0, "sequence"), (0.5, "sequence"), (0.0, "token"), (0.5, "token")):

        def ratio(i, t, whole=level == "sequence"):
            return product[i] if whole else rho(i, t)

        yield case(
            "topr",
            "-sg(clip(product of r, 0, 1)) A log p where A <= threshold; or each token's own r",
            "arXiv 2503.14286",
            lambda i, t, r=ratio, h=threshold: ref.topr(lp[i, t], r(i, t), advantages[i, t], h),
            metrics={
                "avg_alpha": token_mean(
                    lambda i, t, r=ratio, h=threshold: (
                        min(r(i, t), 1) if advantages[i, t] <= h else 1.0
                    )
                ),
                "avg_ratio": token_mean(ratio),
            },
            advantage_threshold=threshold,
            ratio_level=level,
        )
    for tau in (1.0, 0.5):
        yield case(
            "opmd",
            "-A log p / (1+tau)",
            "arXiv 2505.17826",
            lambda i, t, tau=tau: ref.opmd(lp[i, t], advantages[i, t], tau),
            tau=tau,
        )


def likelihood_cases():
    for kind, source in (("sft", "maximum likelihood"), ("sft_is", "arXiv 2508.05629")):
        formula = {"sft": "-log p", "sft_is": "-sg(p) log p"}[kind]
        yield case(kind, formula, source, lambda i, t, k=kind: ref.sft(lp[i, t], k))
    for cutoff in (1.0, 0.6):
        yield case(
            "sft_phi",
            "-min(log p, log cutoff) sg(p(1-p))",
            "arXiv 2508.11408",
            lambda i, t, c=cutoff: ref.sft(lp[i, t], "sft_phi", c),
            cutoff_prob=cutoff,
        )


def sequence_cases():
    for low, high in ((3e-4, 4e-4), (0.2, 0.2)):
        yield case(
            "gspo",
            "-min(sA, clip(s)A), s = exp(mean log r)",
            "arXiv 2507.18071",
            lambda i, t, lo=low, hi=high: ref.gspo(
                lp[i, t], old[i, t], advantages[i, t], of_row[i], lo, hi
            ),
            "seq-mean-token-mean",
            metrics={"ppo_kl": MEAN_KL, "ppo_kl_seq": np.mean(-np.log(of_row))},
            clip_range_low=low,
            clip_range_high=high,
        )


def rec_cases():
    variants = [
        {},
        {"clip_mode": "two-side"},
        {"clip_mode": "one-side", "weight": "importance_sampling"},
        {"clip_mode": "ring"},
        {"clip_mode": "gspo-one-side", "weight": "importance_sampling"},
        {"weight": "gspo_importance_sampling"},
        {"weight": "advantage", "temp": 2.0},
        {"regularizer": "k2", "regularizer_coef": 0.1},
        {"regularizer": "forward-kl", "regularizer_coef": 0.1},
    ]
    for args in variants:
        renamed = {"regularizer_coef": "c"}
        own = {renamed.get(k, k): v for k, v in args.items()}
        mode = "seq-mean-token-mean" if args.get("clip_mode") == "gspo-one-side" else "token-mean"
        yield case(
            "rec",
            "-A' K log p + regulariser",
            "arXiv 2509.24203",
            lambda i, t, own=own: ref.rec(lp[i, t], old[i, t], advantages[i, t], of_row[i], **own),
            mode,
            **args,
        )


def mix_cases():
    usual, demo = mask & ~expert, expert
    for name, mu, kind, args, step in (
        ("mix", 0.1, "sft", {}, 1),
        ("mix", 0.6, "sft", {"mu": 0.6}, 1),
        (
            "mix_chord",
            ref.mu(15, 10, 20, 0.5, 0.1),
            "sft_phi",
            {"mu_warmup_steps": 10, "mu_decay_steps": 20, "mu_peak": 0.5, "mu_valley": 0.1},
            15,
        ),
    ):
        own, own_slope = over_tokens(at(ref.ppo), usual)
        shown, shown_slope = over_tokens(lambda i, t, k=kind: ref.sft(lp[i, t], k), demo)
        w, v = (1 - mu) / usual.sum(), mu / demo.sum()
        yield entry(
            name,
            {**args, "step": step},
            "token-mean",
            "(1-mu) PPO(own rows) + mu SFT(demonstrations), each a mean over its own tokens",
            "arXiv 2505.17826" if name == "mix" else "arXiv 2508.11408",
            w * own.sum() + v * shown.sum(),
            w * own_slope + v * shown_slope,
            {f"expert/{kind}_loss": v * shown.sum(), "usual/pg_loss": w * own.sum()},
        )


def dpo_cases():
    sums = [(lp[i] - ref_lp[i])[mask[i]].sum() for i in range(4)]
    for beta, smoothing in ((0.1, 0.0), (0.5, 0.1)):
        pairs = [ref.dpo_pair(sums[k], sums[k + 1], beta, smoothing) for k in (0, 2)]
        gradient = np.zeros(mask.shape)
        for k in (0, 2):
            z = beta * (sums[k] - sums[k + 1])
            slope = beta * (1 / (1 + math.exp(-z)) - (1 - smoothing)) / 2
            gradient[k][mask[k]], gradient[k + 1][mask[k + 1]] = slope, -slope
        yield entry(
            "dpo",
            {"beta": beta, "label_smoothing": smoothing},
            "token-mean",
            "mean over pairs of -(1-s) log sigmoid(beta z) - s log sigmoid(-beta z)",
            "arXiv 2305.18290",
            np.mean(pairs),
            gradient,
            {
                "chosen_reward": beta * np.mean([sums[0], sums[2]]),
                "rejected_reward": beta * np.mean([sums[1], sums[3]]),
                "accuracy_mean": np.mean([sums[0] > sums[1], sums[2] > sums[3]]),
            },
        )


# the .1 is given at a tool's token: it belongs to the choice before it
REWARDS = [[0, 0, 0.1, 0, 1], [0, 0, 0, 0.5, 0], [0, 2, 0, 0, 0], [-1, 0, 0, 0.25, 0]]
VALUES = [[0.1, 0.2, 9, 0.3, 0.4], [0.0, 0.1, 0.2, 0.3, 9], [0.5, 0.6, 9, 9, 9], [0.1] * 5]
UID = ["a", "a", "b", "b"]


def in_trainer_entry(name, args, formula, source, rows, returns=None):
    return {
        "advantage_fn": name,
        "args": args,
        "formula": formula,
        "source": source,
        "advantages": np.round(np.array(rows) * mask, 9).tolist(),
        "returns": np.round(np.array(rows if returns is None else returns) * mask, 9).tolist(),
    }


def spread_over_tokens(scores):
    return [[s] * 5 for s in scores]


def by_group(function):
    totals = [sum(row) for row in REWARDS]
    return [*function(totals[:2]), *function(totals[2:])]


def in_trainer_cases():
    masks = [list(map(bool, row)) for row in MASK]
    for gamma, lam in ((1.0, 1.0), (1.0, 0.95), (0.9, 0.8)):
        plain = [
            adv.gae(r, v, m, gamma, lam) for r, v, m in zip(REWARDS, VALUES, masks, strict=True)
        ]
        targets = [
            [a + v for a, v in zip(row, values, strict=True)]
            for row, values in zip(plain, VALUES, strict=True)
        ]
        yield in_trainer_entry(
            "ppo",
            {"gamma": gamma, "lam": lam},
            "GAE over valid tokens, whitened",
            "arXiv 1506.02438",
            adv.whiten(plain, masks),
            targets,
        )
    for gamma in (1.0, 0.9):
        totals = [adv.returns(r, m, gamma) for r, m in zip(REWARDS, masks, strict=True)]
        yield in_trainer_entry(
            "reinforceplusplus",
            {"gamma": gamma},
            "discounted returns, whitened",
            "arXiv 2501.03262",
            adv.whiten(totals, masks),
            totals,
        )
    centred = spread_over_tokens(by_group(lambda g: [r - adv.mean(g) for r in g]))
    yield in_trainer_entry(
        "reinforceplusplus_baseline",
        {},
        "r - group mean, whitened",
        "arXiv 2501.03262",
        adv.whiten(centred, masks),
        centred,
    )
    for name, args, function, source in (
        ("rloo", {}, adv.leave_one_out, "arXiv 2402.14740"),
        ("grpo_verl", {}, adv.grpo, "arXiv 2402.03300"),
        ("opmd_verl", {}, adv.opmd, "arXiv 2505.17826"),
        (
            "opmd_verl",
            {"opmd_baseline": "logavgexp", "tau": 0.5},
            lambda g: adv.opmd(g, "logavgexp", 0.5),
            "arXiv 2505.17826",
        ),
        ("asymre_verl", {}, adv.asymre, "arXiv 2506.20520"),
    ):
        rows = spread_over_tokens(by_group(function))
        yield in_trainer_entry(name, args, name, source, rows)
    totals = [adv.returns(r, m) for r, m in zip(REWARDS, masks, strict=True)]
    yield in_trainer_entry(
        "remax",
        {},
        "returns - greedy reward (.5)",
        "arXiv 2310.10505",
        [[x - 0.5 for x in row] for row in totals],
        totals,
    )
    for beta in (0.0, 0.25, 0.5, 1.0):
        yield in_trainer_entry(
            "jsd",
            {"lambda_coef": beta, "kl_coef": 0.7},
            "-k (1-beta) log(q/m)",
            "arXiv 2306.13649",
            [
                [adv.jsd_advantage(lp[i, t], ref_lp[i, t], beta, 0.7) for t in range(5)]
                for i in range(4)
            ],
        )
    yield in_trainer_entry(
        "on_policy_distill",
        {"kl_coef": 2.0},
        "k (t - o)",
        "arXiv 2306.13649",
        (2.0 * (ref_lp - lp)).tolist(),
    )


def build() -> dict[str, object]:
    makers = (
        ppo_cases,
        ratio_cases,
        weighted_cases,
        likelihood_cases,
        sequence_cases,
        rec_cases,
        mix_cases,
        dpo_cases,
    )
    inputs = {
        "logprob": LOGPROB,
        "log_ratio_to_old": LOG_RATIO,
        "log_ratio_to_ref": REF_LOG_RATIO,
        "advantages": ADVANTAGES,
        "action_mask": MASK,
        "expert_rows": EXPERT_ROWS,
    }
    batch = {"token_level_rewards": REWARDS, "values": VALUES, "uid": UID, "reward_baseline": 0.5}
    return {
        "losses.json": {"inputs": inputs, "cases": [c for make in makers for c in make()]},
        "in_trainer.json": {"inputs": inputs | batch, "cases": list(in_trainer_cases())},
    }


def as_text(content: dict[str, object]) -> str:
    """One line for each case, so that a change shows as a changed line."""
    cases = ",\n  ".join(json.dumps(case) for case in content["cases"])
    return f'{{"inputs": {json.dumps(content["inputs"])},\n "cases": [\n  {cases}\n]}}\n'


if __name__ == "__main__":
    for name, content in build().items():
        (HERE / name).write_text(as_text(content))
