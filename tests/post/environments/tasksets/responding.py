"""A taskset with a harness that speaks another dialect."""

import httpx
import verifiers.v1 as vf

__all__ = ["Harness", "Responding"]


class Responding(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self) -> list[vf.Task]:
        return [vf.Task(vf.TaskData(prompt="good"))]


class Harness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data
    ) -> vf.ProgramResult:
        body = {"model": ctx.model, "input": [{"role": "user", "content": data.prompt}]}
        async with httpx.AsyncClient(timeout=None) as client:
            answer = await client.post(
                f"{endpoint}/responses", json=body, headers={"Authorization": f"Bearer {secret}"}
            )
        return vf.ProgramResult(1, "", answer.text)
