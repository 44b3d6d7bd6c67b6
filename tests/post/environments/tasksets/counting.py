"""A taskset with a tool, a server of the Model Context Protocol for each rollout, which shares a
state with the task.
"""

import verifiers.v1 as vf

__all__ = ["Counting"]


class Count(vf.State):
    count: int = 0


class Counter(vf.Toolset[vf.ToolsetConfig, Count]):
    TOOL_PREFIX = None

    @vf.tool
    async def go(self) -> str:
        """Go on."""
        self.state.count += 1
        return str(self.state.count)


class CountData(vf.TaskData):
    limit: int


class CountTask(vf.Task[CountData, Count]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Counter(vf.ToolsetConfig())]

    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return trace.state.count >= self.data.limit

    @vf.reward
    async def counted(self, trace: vf.Trace) -> float:
        return float(trace.state.count)


class Counting(vf.Taskset[CountTask, vf.TasksetConfig]):
    def load(self) -> list[CountTask]:
        return [CountTask(CountData(prompt="Count", limit=limit)) for limit in (2, 9)]


if __name__ == "__main__":
    Counter.run()
