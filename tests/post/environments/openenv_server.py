"""A server of OpenEnv, by the real package, with an environment of actions or one of tools:
`openenv_server.py KIND PORT`.
"""

import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Add(Action):
    """Add a number to the sum."""

    number: int


class Sum(Observation):
    total: int = 0


class Adding(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: Any = None, episode_id: Any = None, start: int = 0, **row: Any) -> Sum:
        self.total = start
        return Sum(total=start)

    def step(self, action: Any, timeout_s: Any = None, **options: Any) -> Sum:
        self.total += action.number
        return Sum(total=self.total, reward=float(action.number), done=self.total > 9)

    @property
    def state(self) -> State:
        return State()


class Echo(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("echo")

        @server.tool
        def echo_message(message: str) -> str:
            """Say it again."""
            return message

        super().__init__(server)

    def reset(self, seed: Any = None, episode_id: Any = None, **row: Any) -> Observation:
        return Observation()

    def _step_impl(self, action: Any, timeout_s: Any = None, **options: Any) -> Observation:
        return Observation()

    @property
    def state(self) -> State:
        return State()


kinds = {"adding": (Adding, Add, Sum), "echo": (Echo, CallToolAction, CallToolObservation)}
uvicorn.run(
    create_fastapi_app(*kinds[sys.argv[1]], max_concurrent_envs=8),
    port=int(sys.argv[2]),
    log_level="warning",
)
