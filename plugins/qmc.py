"""QuasiMoTTo: quasi-Monte Carlo rollouts (arXiv:2607.01179; arithmetic sampling: arXiv:2210.15458).

    x_t     = the v with  l_t(v) <= u_t < l_t(v) + w_t(v)       bins in the order o_t; w_t(v) = p_t(v | x_<t) as sampled
    u_{t+1} = (u_t - l_t(x_t)) / w_t(x_t)                       one number in [0, 1) decodes a whole completion
    I_{t+1} = I_t - log2 w_t(x_t)                               bits used; I >= refresh_bits: a new u ~ U[0, 1), I = 0

The first numbers of k siblings are drawn together, each alone uniform (D, xi ~ U[0, 1), s a random permutation):

    lattice      u_i = (D + i / k) mod 1                        one random number for all; best coverage
    stratified   u_i = (s_i + xi_i) / k                         one row in each k-th of the interval
    token_sobol  u_{i,t} = ((z_{i,t} xor d_t) + xi_{i,t}) / B   Sobol point z_i of integers below B = 2^30, a shift d
    vilnis       u_i = (D + (i + 1) / (k + 1)) mod 1            the ancestor's spacing
    antithetic   u_2j = D_j,  u_{2j+1} = 1 - D_j                pairs

Given its own prefix u is uniform, so every row follows the policy exactly, whatever its siblings do, and so it does
when u is renewed by a rule that reads the prefix alone. Renewal is needed: each bit used doubles what rounding errors
of the logits do to u, so that after 20 bits another batch would give other tokens, and after 53 u has no digit left; a
prefix of more than log2 k bits holds one row, so nothing is lost. Together the rows cover the interval: with p = P(right) every
such law has pass@k <= min(1, k p), and the lattice reaches it where the right answers are one interval. It changes no
law, so it stacks on any loss, weight and KL. The mean of the group remains a good baseline (`algo=coupled`, dr_grpo,
GRPO); the mean or the best of the others is biased, so leave-one-out methods are refused.
"""

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from math import log2

import numpy as np
import torch

from grpozoo import Plugin, UserError, hookimpl, may_be_infinite
from grpozoo.rng import stream
from grpozoo.sampling import Choice, TokenSampler, counted_bits, counted_uniform

Design = Enum("Design", ["lattice", "stratified", "token_sobol", "vilnis", "antithetic"])
Order = Enum("Order", ["auto", "id", "desc", "head"])
B = 2**30
BELOW_ONE = 1 - 2**-53
SORTED = 4096  # largest vocabulary that `auto` sorts
HEAD = 64  # tokens that `head` puts before the others
COUPLED = "sampler=qmc couples the completions of a group, so the others are no independent baseline; take algo=coupled"


class Siblings(TokenSampler):
    """Each row's coordinate, the bits it used up, and how often it was renewed; all rows of a call move at once."""

    independent = False

    def __init__(self, config):
        self.config = config

    def start(self, requests, seed, step, max_tokens):
        parts = [part for request in requests for part in self.blocks(request, seed, step)]
        self.u, self.key, self.shift, design, block, index, k = (
            torch.from_numpy(np.concatenate(column)) for column in zip(*parts, strict=True)
        )  # [rows] each
        self.table = {"design": design, "block": block, "index": index, "k": k}
        self.index, self.nets = index, design == Design.token_sobol.value
        dims = min(self.config.sobol_dims, max_tokens)
        self.z = net(int(k.max()), dims) if bool(self.nets.any()) else None  # [points, dims] int64
        self.bits, self.renewed = torch.zeros_like(self.u), torch.zeros_like(self.key)

    def blocks(self, request, seed, step):
        """The first coordinates, keys and places of a request's rows; the same in every process that gets the request."""
        evaluation = request.tag == "eval"
        design = self.config.eval_design if evaluation else self.config.design
        name = (step, request.prompt.id, request.group_id, request.tag, request.policy, request.sample_ids[0])
        count = len(request.sample_ids)
        pieces = 1 if evaluation else min(self.config.blocks, count)
        for block in range(pieces):
            k = count * (block + 1) // pieces - count * block // pieces
            rng = stream(seed, "qmc", *name, block)
            u, index = first(design, k, rng)
            key, shift = rng.integers(2**63, size=k), rng.integers(2**63)
            yield u, key, *(np.full(k, value) for value in (shift, design.value, block)), index, np.full(k, k)

    def next(self, choice, rows, position):
        device = choice.warped.device
        if self.u.device != device:
            for name in ("u", "key", "shift", "index", "nets", "bits", "renewed", "z"):
                setattr(self, name, None if (value := getattr(self, name)) is None else value.to(device))
        rows = rows.to(device)
        due = rows[self.bits[rows] >= self.config.refresh_bits]
        if len(due):
            self.renewed[due] += 1
            self.u[due], self.bits[due] = counted_uniform(self.key[due], self.renewed[due]), 0.0
        u = self.u[rows]
        if self.z is not None:
            u = torch.where(self.nets[rows], self.points(rows, position), u)
        token, low, width = self.pick(choice, u)
        self.u[rows] = ((u - low) / width).clamp(0, BELOW_ONE)
        self.bits[rows] -= width.log2()
        return token

    def points(self, rows, position):
        """[n] float64: this position's coordinates of the rows' Sobol points, independent numbers after `sobol_dims`."""
        n = torch.tensor(position)
        xi = counted_uniform(self.key[rows], n)
        if position >= self.z.shape[1]:
            return xi
        return shifted(self.z[self.index[rows], position], counted_bits(self.shift[rows], n) >> 33, xi)

    def pick(self, choice, u):
        """`Choice.pick` with the bins in the chosen order, a function of the law alone: siblings share it."""
        warped, order = choice.warped, self.config.order
        if order is Order.auto:
            order = Order.desc if warped.shape[-1] <= SORTED else Order.id
        if order is Order.id:
            return choice.pick(u)
        if order is Order.desc:
            values, ids = warped.sort(dim=-1, descending=True, stable=True)
        else:
            top, ids = warped.topk(min(HEAD, warped.shape[-1]))
            values = torch.cat([top, warped.scatter(-1, ids, -torch.inf)], -1)
        place, low, width = Choice(values).pick(u)
        token = ids.gather(-1, place.clamp(max=ids.shape[-1] - 1)[:, None])[:, 0]
        return torch.where(place < ids.shape[-1], token, place - ids.shape[-1]), low, width

    def design(self):
        return self.table

    def sets(self, design, count, m):
        if set(design["k"]) != {count}:
            return []  # a row is missing, or the rows are several blocks
        order = sorted(range(count), key=lambda row: design["index"][row])
        kind, (r, left) = Design(design["design"][0]), divmod(count, m)
        if left:
            return []
        if kind is Design.lattice:  # every r-th point is a lattice of m
            return [[[row] for row in order[j::r]] for j in range(r)]
        if kind is Design.stratified:  # r neighbouring strata are one of m
            return [[order[j : j + r] for j in range(0, count, r)]]
        if m == count or (kind is Design.token_sobol and not m & (m - 1)) or (kind is Design.antithetic and not m % 2):
            return [[[row] for row in order[j : j + m]] for j in range(0, count, m)]
        return []


def first(design, k, rng):
    """The numbers u_{i,1} [k] of the siblings, and their places i or s_i [k]."""
    i = np.arange(k)
    if design is Design.stratified:
        i = rng.permutation(k)
        u = (i + rng.random(k)) / k
    elif design is Design.antithetic:
        u = np.repeat(rng.random((k + 1) // 2), 2)[:k]
        u[1::2] = BELOW_ONE - u[1::2]
    elif design is Design.token_sobol:
        u = rng.random(k)  # not used: each token has its own coordinate
    else:
        u = (rng.random() + (i / k if design is Design.lattice else (i + 1) / (k + 1))) % 1
    return np.minimum(u, BELOW_ONE), i


@lru_cache(maxsize=4)
def net(k, dims):
    """The first k (or more) points of the Sobol sequence as integers below B: [points, dims] int64."""
    from scipy.stats import qmc

    points = qmc.Sobol(dims, scramble=False, bits=30).random_base2((k - 1).bit_length())
    return torch.from_numpy((points * B).astype(np.int64))


def shifted(z, shift, xi):
    """Digital shift of integers below B, and xi in [0, 1) in the place of the digits that they lack: in [0, 1)."""
    return (((z ^ shift) + xi) / B).clamp(max=BELOW_ONE)


class Qmc(Plugin):
    """`sampler=qmc`."""

    conflicts = {"rloo": COUPLED, "passk": COUPLED, "max_at_k": COUPLED}

    @dataclass
    class Config:
        design: Design = Design.stratified  # of training; a lattice can cancel a direction of the reward
        eval_design: Design = Design.lattice  # of held-out evaluation; published for pass@k
        blocks: int = 1  # independent designs in a training group, at least 1; 2 or more for baseline=cross_block
        order: Order = Order.auto  # o_t: id | desc (by probability) | head (the 64 likeliest, then ids); auto: see YAML
        refresh_bits: float = may_be_infinite(
            12.0
        )  # bits after which u is renewed, above 0, at least log2 k; published: never (inf)
        sobol_dims: int = 256  # tokens with coordinates of a Sobol point, 1 to 21201; independent numbers after

        def __post_init__(self):
            if self.blocks < 1:
                raise ValueError(f"blocks is at least 1, got {self.blocks}")
            if not self.refresh_bits > 0:
                raise ValueError(f"refresh_bits is above 0, got {self.refresh_bits}")
            if not 1 <= self.sobol_dims <= 21201:
                raise ValueError(f"sobol_dims lies in 1..21201, got {self.sobol_dims}")

    @hookimpl
    def validate(self, config):
        blocks, size = self.config.blocks, config.group_size
        if size % blocks:
            raise UserError(
                f"plugins.{self.name}.blocks={blocks} does not divide group_size={size}: blocks of one size are needed"
            )
        notices = [
            f"{self.name}: a Sobol net of {k} points, not a power of 2, covers less evenly ({key})"
            for key, design, k in (
                ("group_size", self.config.design, size // blocks),
                ("eval.samples", self.config.eval_design, config.eval.samples),
            )
            if design is Design.token_sobol and k & (k - 1)
        ]
        if self.config.refresh_bits < log2(max(size // blocks, config.eval.samples, 1)):
            notices.append(
                f"{self.name}: refresh_bits={self.config.refresh_bits:g} renews rows before siblings have parted"
            )
        return "\n".join(notices) or None

    @hookimpl
    def token_sampler(self):
        return Siblings(self.config)
