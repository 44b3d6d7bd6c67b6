"""The chat page: one file, with a content security policy that stops a browser from loading anything else."""

import base64
import hashlib
import re
from importlib.resources import files

from starlette.responses import HTMLResponse


def chat_page() -> HTMLResponse:
    """The page: only its own style and script, identified by their hashes, may run."""
    text = (files("lmforge.serve") / "web" / "index.html").read_text("utf-8")
    hashes = {}
    for tag in ("style", "script"):
        [inline] = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)
        hashes[tag] = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{hashes['style']}'; script-src 'sha256-{hashes['script']}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return HTMLResponse(text, headers=headers)
