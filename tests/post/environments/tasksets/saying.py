"""A taskset of one answer: say a word. It has no harness of its own."""

import verifiers.v1 as vf

__all__ = ["Saying"]
WORDS = ("[go()]", "stop")


class WordData(vf.TaskData):
    word: str


class WordTask(vf.Task[WordData]):
    @vf.reward
    async def said(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.word)

    @vf.reward(weight=0.5)
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class Saying(vf.Taskset[WordTask, vf.TasksetConfig]):
    def load(self) -> list[WordTask]:
        return [
            WordTask(WordData(prompt=f"Say {word}", system_prompt="Be brief.", word=word))
            for word in WORDS
        ]
