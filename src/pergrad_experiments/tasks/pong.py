"""Proximal policy optimisation on Atari Pong, with vectorised environments.

Frames are 84×84, four in a row. Three convolutions and a dense layer of 512 feed policy and value: 4M parameters. In
turns, ``envs`` environments are played for ``rollout`` steps, and the transitions gone through ``epochs`` times, in
minibatches of the batch size. An example is a transition; its loss is the clipped surrogate, plus the error of the value,
minus entropy. Advantages are normalised over the whole rollout. Return is the mean over episodes that are played with a
policy that draws its actions; one that is not over after ``eval_steps`` counts as far as it went.

An emulator's state cannot be stored: episodes begin anew wherever a checkpoint is written.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ..errors import BadInput
from .common import Model, Preset, Task, jitted, positive

ACTIONS = 6


@dataclasses.dataclass(frozen=True)
class Options:
    channels: int = 32  # of the first convolution; the others have twice as many
    units: int = 512
    envs: int = 8
    rollout: int = 128
    epochs: int = 3
    discount: float = 0.99
    smoothing: float = 0.95  # λ of the advantages
    clip: float = 0.1
    value_weight: float = 0.5
    entropy_weight: float = 0.01
    eval_episodes: int = 8
    eval_steps: int = 5000


PRESETS = {
    "smoke": Preset(
        Options(channels=2, units=8, envs=2, rollout=16, epochs=1, eval_episodes=2, eval_steps=20),
        *(8, 8, 1e-3),
        eval_every=8,
        stats_every=4,
        checkpoint_every=4,
    ),
    "cpu": Preset(
        Options(channels=8, units=128, envs=8, rollout=64, eval_episodes=4, eval_steps=1500),
        *(600, 128, 1e-3),
        clip_norm=0.5,
        eval_every=300,
        stats_every=120,
        checkpoint_every=300,
    ),
    "gpu": Preset(
        Options(envs=32),
        *(48_000, 512, 5e-4),
        schedule="linear",
        clip_norm=0.5,
        eval_every=2400,
        stats_every=1200,
        checkpoint_every=2400,
    ),
    "paper": Preset(
        Options(),
        *(58_000, 256, 2.5e-4),
        schedule="linear",
        clip_norm=0.5,
        eval_every=2400,
        stats_every=1200,
        checkpoint_every=2400,
    ),
}


class Net(nnx.Module):
    def __init__(self, options: Options, rngs: nnx.Rngs):
        c = options.channels
        self.first = nnx.Conv(4, c, (8, 8), strides=4, rngs=rngs)
        self.second = nnx.Conv(c, 2 * c, (4, 4), strides=2, rngs=rngs)
        self.third = nnx.Conv(2 * c, 2 * c, (3, 3), rngs=rngs)
        self.dense = nnx.Linear(11 * 11 * 2 * c, options.units, rngs=rngs)
        self.policy = nnx.Linear(options.units, ACTIONS, rngs=rngs)
        self.value = nnx.Linear(options.units, 1, rngs=rngs)

    def __call__(self, frames):
        """Logits of the actions, and values."""
        h = frames.astype(jnp.float32) / 255
        for layer in (self.first, self.second, self.third):
            h = nnx.relu(layer(h))
        h = nnx.relu(self.dense(h.reshape(len(h), -1)))
        return self.policy(h), self.value(h)[:, 0]


def network(options: Options) -> Model:
    positive(options, "channels", "units", "envs", "rollout", "epochs", "eval_episodes", "eval_steps")
    return Model(lambda rngs: Net(options, rngs))


def init(options: Options):
    return network(options).init


def checkpoint_multiple(options: Options, config) -> int:
    """The updates that are made of one rollout."""
    size = options.envs * options.rollout
    if config.batch_size > size or size % config.batch_size:
        raise BadInput(
            f"the batch has {config.batch_size} examples, and a rollout {size} ({options.envs} envs × {options.rollout} "
            "steps): expected a divisor of it."
        )
    return options.epochs * (size // config.batch_size)


# ------------------------------------------------------------------------------------- playing


class Game:
    """Environments that begin in a state that the seed says."""

    def __init__(self, number: int, seed: tuple[int, ...]):
        from ale_py.vector_env import AtariVectorEnv
        from gymnasium.vector import AutoresetMode

        # An episode that is over begins anew in the same step, so that every action counts.
        self.env = AtariVectorEnv("pong", number, autoreset_mode=AutoresetMode.SAME_STEP)
        first, _ = self.env.reset(seed=int(np.random.default_rng(seed).integers(2**31)))
        self.frames = self._last(first)

    @staticmethod
    def _last(frames):
        return np.ascontiguousarray(np.moveaxis(frames, 1, -1))

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rewards, and whether the episode is over."""
        frames, rewards, terminated, truncated, _ = self.env.step(actions)
        self.frames = self._last(frames)
        return np.asarray(rewards, np.float32), terminated | truncated

    def close(self):
        self.env.close()


def draw(rng: np.random.Generator, logits: np.ndarray) -> np.ndarray:
    return np.argmax(logits + rng.gumbel(size=logits.shape), axis=-1)


def advantages(rewards, values, over, last_values, discount, smoothing):
    """Generalised advantage estimates: Aₜ = δₜ + γλ Aₜ₊₁ within an episode, δₜ = rₜ + γ Vₜ₊₁ − Vₜ. Arrays are [steps, envs]."""
    found, following, after = np.zeros_like(values), np.zeros_like(last_values), last_values
    for t in reversed(range(len(rewards))):
        goes_on = 1.0 - over[t]
        delta = rewards[t] + discount * goes_on * after - values[t]
        following = delta + discount * smoothing * goes_on * following
        found[t], after = following, values[t]
    return found


def make(options: Options, config) -> Task:
    model = network(options)
    per_rollout = checkpoint_multiple(options, config)
    size = options.envs * options.rollout

    @partial(jitted, config)
    def act(params, frames):
        logits, values = model(params)(frames)
        return jax.nn.log_softmax(logits), values

    def play(game: Game, params, rng) -> dict[str, np.ndarray]:
        rows: dict[str, list] = {name: [] for name in ("image", "action", "log_prob", "value", "reward", "over")}
        for _ in range(options.rollout):
            log_probs, values = jax.device_get(act(params, game.frames))
            actions = draw(rng, log_probs)
            rows["image"].append(game.frames)
            rows["action"].append(actions.astype(np.int32))
            rows["log_prob"].append(np.take_along_axis(log_probs, actions[:, None], 1)[:, 0])
            rows["value"].append(values)
            rewards, over = game.step(actions)
            rows["reward"].append(rewards)
            rows["over"].append(over)
        found = {name: np.stack(x) for name, x in rows.items()}
        last = np.asarray(act(params, game.frames)[1])
        found["advantage"] = advantages(
            found["reward"], found["value"], found["over"], last, options.discount, options.smoothing
        )
        found["target"] = found["advantage"] + found["value"]
        found = {name: x.reshape(size, *x.shape[2:]) for name, x in found.items()}
        a = found["advantage"]
        found["advantage"] = (a - a.mean()) / (a.std() + 1e-8)
        return {name: found[name] for name in ("image", "action", "log_prob", "advantage", "target")}

    def batches(start, current):
        step, game = start, None
        while True:
            if game is None or step % config.checkpoint_every == 0:
                if game is not None:
                    game.close()
                game = Game(options.envs, (config.seed, step))
            rng = np.random.default_rng((config.seed, step, 1))
            found = play(game, current(), rng)
            first = step // per_rollout * size
            found["index"] = np.arange(first, first + size, dtype=np.int32)
            for _ in range(options.epochs):
                order = rng.permutation(size)
                for places in np.split(order, size // config.batch_size):
                    yield {name: x[places] for name, x in found.items()}
                    step += 1

    def loss(params, batch, key):
        del key
        logits, values = model(params)(batch["image"])
        log_probs = jax.nn.log_softmax(logits)
        log_prob = jnp.take_along_axis(log_probs, batch["action"][:, None], axis=1)[:, 0]
        ratio, advantage = jnp.exp(log_prob - batch["log_prob"]), batch["advantage"]
        clipped = jnp.clip(ratio, 1 - options.clip, 1 + options.clip)
        surrogate = jnp.minimum(ratio * advantage, clipped * advantage)
        entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=1)
        error = optax.l2_loss(values, batch["target"]) * 2
        return jnp.mean(options.value_weight * error - surrogate - options.entropy_weight * entropy)

    def evaluate(params):
        rng = np.random.default_rng(2**32 + 1)
        game = Game(options.eval_episodes, (2**32 + 1,))
        returns, playing = np.zeros(options.eval_episodes), np.ones(options.eval_episodes, bool)
        for _ in range(options.eval_steps):
            rewards, over = game.step(draw(rng, np.asarray(act(params, game.frames)[0])))
            returns += rewards * playing
            playing &= ~over
            if not playing.any():
                break
        game.close()
        return {"return": float(returns.mean()), "finished": float(np.mean(~playing))}

    return Task(
        init=model.init,
        loss=loss,
        batches=batches,
        evaluate=evaluate,
        show=lambda batch, i: np.asarray(batch["image"][i][..., -1]),
        data={"pong": {"source": "ale-py"}},
    )
