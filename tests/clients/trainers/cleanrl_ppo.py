"""PPO in one file, as cleanrl has it: an agent of two networks, environments in a vector, clipped ratios."""

import gymnasium
import torch
from torch import nn
from torch.distributions.categorical import Categorical

import hookstats  # +

ENVS, STEPS, MINIBATCHES = 4, 128, 4


def layer_init(layer, std=2**0.5, bias_const=0.0):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    def __init__(self, seen: int, actions: int):
        super().__init__()
        first, second = [[layer_init(nn.Linear(seen, 64)), layer_init(nn.Linear(64, 64))] for _ in range(2)]
        self.critic = nn.Sequential(first[0], nn.Tanh(), first[1], nn.Tanh(), layer_init(nn.Linear(64, 1), std=1.0))
        self.actor = nn.Sequential(
            second[0], nn.Tanh(), second[1], nn.Tanh(), layer_init(nn.Linear(64, actions), std=0.01)
        )

    def get_action_and_value(self, x, action=None):
        chances = Categorical(logits=self.actor(x))
        action = chances.sample() if action is None else action
        return action, chances.log_prob(action), chances.entropy(), self.critic(x).squeeze(-1)


def rollout(envs, agent, seen, done):
    kept = []
    for _ in range(STEPS):
        with torch.no_grad():
            action, logprob, _, value = agent.get_action_and_value(seen)
        now, reward, ended, cut, _ = envs.step(action.numpy())
        kept.append((seen, action, logprob, value, torch.tensor(reward, dtype=torch.float32), done))
        seen, done = torch.tensor(now), torch.tensor(ended | cut, dtype=torch.float32)
    return [torch.stack(each) for each in zip(*kept, strict=True)], seen, done


def advantages_of(rewards, values, dones, next_value, next_done):
    values, dones = torch.cat([values, next_value[None]]), torch.cat([dones, next_done[None]])
    made, last = torch.zeros_like(rewards), 0
    for t in reversed(range(STEPS)):
        delta = rewards[t] + 0.99 * values[t + 1] * (1 - dones[t + 1]) - values[t]
        made[t] = last = delta + 0.99 * 0.95 * (1 - dones[t + 1]) * last
    return made


def train() -> torch.nn.Module:
    envs = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("CartPole-v1") for _ in range(ENVS)])
    agent = Agent(4, 2)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    options = hookstats.Options(training_only=True)  # +
    monitor = hookstats.attach(agent, options=options, sinks=hookstats.record("runs"))  # +
    seen, done = torch.tensor(envs.reset(seed=1)[0]), torch.zeros(ENVS)
    for iteration in range(4):
        optimizer.param_groups[0]["lr"] = (1 - iteration / 4) * 2.5e-4
        (states, actions, logprobs, values, rewards, dones), seen, done = rollout(envs, agent, seen, done)
        with torch.no_grad():
            advantages = advantages_of(rewards, values, dones, agent.critic(seen).squeeze(-1), done)
        batch = [each.flatten(0, 1) for each in (states, actions, logprobs, advantages, advantages + values, values)]
        for _ in range(4):
            for chosen in torch.randperm(ENVS * STEPS).chunk(MINIBATCHES):
                state, action, old, advantage, returned, before = (each[chosen] for each in batch)
                _, logprob, entropy, value = agent.get_action_and_value(state, action)
                ratio = (logprob - old).exp()
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                policy = -torch.min(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)).mean()
                clipped = before + (value - before).clamp(-0.2, 0.2)
                critic = 0.5 * torch.max((value - returned) ** 2, (clipped - returned) ** 2).mean()
                loss = policy - 0.01 * entropy.mean() + 0.5 * critic
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
                monitor.step(loss=loss)  # +
    monitor.detach()  # +
    envs.close()
    return agent
