"""A taskset with a harness that does, after a first task, what its other tasks say."""

import asyncio

import httpx
import verifiers.v1 as vf

__all__ = ["Breaking", "Harness"]
ACTS = ("good", "silent", "hangs", "rewrites", "repeats", "tools", "raises", "images")


class Breaking(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self) -> list[vf.Task]:
        return [vf.Task(vf.TaskData(prompt=act)) for act in ACTS]


class Harness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data
    ) -> vf.ProgramResult:
        act, said = data.prompt, [{"role": "user", "content": data.prompt}]
        if act == "hangs":
            await asyncio.sleep(1000)
        for _ in range(0 if act == "silent" else 2):
            body = {"model": ctx.model, "messages": said}
            if act == "tools" and len(said) > 1:
                body["tools"] = [
                    {"type": "function", "function": {"name": "another", "parameters": {}}}
                ]
            async with httpx.AsyncClient(timeout=None) as client:
                answer = await client.post(
                    f"{endpoint}/chat/completions",
                    json=body,
                    headers={"Authorization": f"Bearer {secret}"},
                )
            if answer.status_code != 200:
                return vf.ProgramResult(1, "", answer.text)
            if act == "raises":
                raise RuntimeError("its line\nand another")
            message = answer.json()["choices"][0]["message"]
            said = {
                "rewrites": [
                    {"role": "user", "content": "Otherwise"},
                    message,
                    {"role": "user", "content": "On"},
                ],
                "repeats": [*said, message],
                "images": [
                    *said,
                    message,
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
                ],
            }.get(act, [*said, message, {"role": "user", "content": "On"}])
        return vf.ProgramResult(0, "", "")
