"""A taskset with an environment of its own, which answers as a user and rewards at the end."""

import verifiers.v1 as vf

__all__ = ["Guess", "Guessing"]


class Guessing(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self) -> list[vf.Task]:
        return [vf.Task(vf.TaskData())]


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class Guess(vf.Env[GuessConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn("Guess")
            for left in range(3):
                if segment.terminated or segment.last_reply == "seven":
                    break
                segment = await interaction.turn(f"No. {2 - left} left")
        interaction.trace.record_reward("turns", interaction.trace.num_turns)
