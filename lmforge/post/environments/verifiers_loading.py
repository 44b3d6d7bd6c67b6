"""What an environment of the package `verifiers` is made of: the package itself, and the modules
and files that are named.
"""

import re
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import expand_home

OLDEST = "0.4"


def sources(address: str) -> tuple[str, list[Path]]:
    """What the environment depends on: the version of verifiers, empty if it is not installed, and
    files: its own, and those of the modules that it names. What verifiers brings along is in its
    version. Raises OSError.
    """
    files = list[Path]()
    names = [address]
    if address.endswith(".toml"):
        files.append(expand_home(address))
        names = re.findall(r"""\bid\s*=\s*["']([^"']+)""", files[0].read_text(errors="replace"))
    for name in names:
        # As verifiers finds them.
        module = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
        with suppress(ImportError, ValueError):
            found = find_spec(module) if module.isidentifier() else None
            if found and found.submodule_search_locations:
                files += sorted(
                    file
                    for folder in found.submodule_search_locations
                    for file in Path(folder).rglob("*.py")
                )
            elif found and found.has_location and found.origin:
                files.append(Path(found.origin))
    try:
        return version("verifiers"), files
    except PackageNotFoundError:
        return "", files


def load(address: str) -> Any:
    """The environment of verifiers.

    Raises UserError where there is none, or verifiers is missing or too old.
    """
    try:
        from pydantic import ValidationError
        from verifiers.v1 import (
            Env,
            SubprocessConfig,
            default_harness_id,
            load_environment,
            resolve_env_config,
        )
        from verifiers.v1.configs.agent import agent_config_fields
    except ImportError:
        try:
            found = f"not {version('verifiers')}"
        except PackageNotFoundError:
            found = "which is not installed here"
        raise UserError(f"needs the package verifiers, from {OLDEST}, {found}") from None
    if not hasattr(Env, "run_episode"):
        raise UserError(f"needs the package verifiers, from {OLDEST}, not {version('verifiers')}")
    try:
        if address.endswith(".toml"):
            table = tomllib.loads(expand_home(address).read_text()).get("env")
            if not isinstance(table, dict):
                raise UserError("the file has no table [env], as configurations of verifiers have")
            return load_environment(resolve_env_config(table))
        config = resolve_env_config({"taskset": {"id": address}})
        # On this host, and if the taskset has no harness of its own, by one in which the model only
        # calls the taskset's tools.
        own = {} if default_harness_id(address) == address else {"harness": {"id": "null"}}
        agents = {
            name: {"runtime": SubprocessConfig(), **({} if agent.harness else own)}
            for name, agent in agent_config_fields(config).items()
        }
        return load_environment(resolve_env_config({"taskset": {"id": address}, **agents}))
    except ValidationError as problem:
        wrong = problem.errors()[0]
        raise UserError(f"env.{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from None
    except (OSError, ImportError, tomllib.TOMLDecodeError) as problem:
        raise UserError(str(problem)) from None
