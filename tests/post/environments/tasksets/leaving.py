"""A taskset with a harness whose tasks end at different times."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress

import httpx
import verifiers.v1 as vf

__all__ = ["Harness", "Leaving"]
left, tried = asyncio.Event(), set[str]()


class Once(vf.Task):
    @vf.reward
    async def heard(self, trace: vf.Trace) -> float:
        if self.data.prompt == "leaves":
            left.set()
        return 0.5 + 10 * len(trace.assistant_messages)


class Leaving(vf.Taskset[Once, vf.TasksetConfig]):
    def load(self) -> Iterator[Once]:
        yield from (Once(vf.TaskData(prompt=act)) for act in ("good", "retried", "leaves", "after"))
        raise OSError("the disk of the tasks is gone")


class Harness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data
    ) -> vf.ProgramResult:
        act = data.prompt
        if act == "after":  # one that left has its reward
            await left.wait()
        if act == "retried" and act not in tried:
            tried.add(act)
            raise RuntimeError("no answer of a registry")
        body = {"model": ctx.model, "messages": [{"role": "user", "content": act}]}
        with suppress(httpx.ReadTimeout):
            async with httpx.AsyncClient(timeout=5 if act == "leaves" else None) as client:
                await client.post(
                    f"{endpoint}/chat/completions",
                    json=body,
                    headers={"Authorization": f"Bearer {secret}"},
                )
        return vf.ProgramResult(0, "", "")
