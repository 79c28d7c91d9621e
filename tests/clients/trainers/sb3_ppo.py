"""stable-baselines3: PPO, whose trainer steps its optimizer itself; a callback of the optimizer closes the steps."""

import gymnasium
import torch
from stable_baselines3 import PPO

import hookstats  # +


def train() -> torch.nn.Module:
    agent = PPO(
        "MlpPolicy", gymnasium.make("CartPole-v1"), n_steps=256, batch_size=64, n_epochs=4, seed=0, device="cpu"
    )
    options = hookstats.Options(training_only=True)  # +
    monitor = hookstats.attach(agent.policy, options=options, sinks=hookstats.record("runs"))  # +
    agent.policy.optimizer.register_step_post_hook(lambda *_: monitor.step())  # +
    agent.learn(1024)
    monitor.detach()  # +
    return agent.policy
