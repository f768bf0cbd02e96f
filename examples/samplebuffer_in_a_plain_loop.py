"""The buffer in a training loop that has nothing else of ours: a softmax policy learns which digit each prompt wants.

Sixty-four coroutines roll out while one loop trains on whole groups, at most one version behind.
"""

import asyncio
import math
import random

from samplebuffer import Batch, Closed, SampleBuffer

DIGITS, STEPS, RATE = 10, 60, 0.5


class Policy:
    def __init__(self) -> None:
        self.version = 0
        self.logits = [[0.0] * DIGITS for _ in range(DIGITS)]

    def chances(self, prompt: int) -> list[float]:
        exps = [math.exp(logit) for logit in self.logits[prompt]]
        return [e / sum(exps) for e in exps]

    def train(self, batch: Batch) -> None:  # REINFORCE with the group's mean as its baseline
        for group in batch.groups:
            prompt, mean = group.key % DIGITS, sum(s.reward for s in group.samples) / len(group.samples)
            for sample in group.samples:
                for digit, chance in enumerate(self.chances(prompt)):
                    self.logits[prompt][digit] += RATE * (sample.reward - mean) * ((digit == sample.payload) - chance)
        self.version += 1


async def rollout(buffer: SampleBuffer, policy: Policy) -> None:
    try:
        while True:
            ticket = await buffer.next_ticket()
            ticket.stamp(policy.version)
            (digit,) = random.choices(range(DIGITS), policy.chances(ticket.key % DIGITS))
            await asyncio.sleep(random.expovariate(1000))  # a slow environment
            ticket.finish(digit, reward=float(digit == ticket.key % DIGITS))
    except Closed:
        return


async def main() -> float:
    policy, reward = Policy(), 0.0
    buffer = SampleBuffer(range(10**9), batch_groups=8, group_size=8, alpha=1, spare_members=1)
    rollouts = [asyncio.create_task(rollout(buffer, policy)) for _ in range(64)]
    for step in range(1, STEPS + 1):
        batch = await buffer.get_batch()
        policy.train(batch)
        buffer.advance(policy.version)
        reward = sum(sample.reward for sample in batch.samples) / len(batch.samples)
        if step % 10 == 0:
            print(f"step {step}: reward {reward:.2f}, staleness {batch.max_staleness}, {batch.ledger}")
    buffer.close()
    await asyncio.gather(*rollouts)
    return reward


if __name__ == "__main__":
    asyncio.run(main())
