"""Commands of an administrator to an engine, as its loop carries them out."""

import functools
from collections.abc import Callable
from typing import Any

from dllm_jax.api import weights
from dllm_jax.api.snapshot import said
from dllm_jax.serve.child.served import Asleep


class Commands:
    """Commands of an administrator to an `LLM`.

    Attributes:
        version: Of the weights.
    """

    def __init__(self, llm: Any, load: Callable[[str], Any]):
        self._llm, self._load = llm, load
        self._staged: Any = None
        self._held: Any = None  # the weights, while they are on the host
        self.version = 0

    @property
    def is_asleep(self) -> bool:
        """Whether the weights are not on the device."""
        return self._held is not None

    def aside(self, name: str, fields: dict[str, Any]) -> Callable[[], dict[str, Any]] | None:
        """The work of a command that goes on while requests run; None: one for `between`."""
        return functools.partial(self._stage, fields["path"]) if name == "stage" else None

    def _stage(self, path: str) -> dict[str, Any]:
        if self.is_asleep:
            raise Asleep
        self._staged = None
        try:
            self._staged = weights.stage(self._llm, lambda: self._load(path))
        except ValueError:
            raise
        except Exception as error:  # a file that is cut, a full device
            raise ValueError(f"{path} cannot be read: {said(error)}") from error
        return {}

    def between(self, name: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Carry out a command while no request runs.

        Raises:
            ValueError: It cannot be done; everything is as before.
        """
        if name in ("sleep", "wake"):
            if name == "sleep" and not self.is_asleep:
                self._held = weights.sleep(self._llm)
            elif name == "wake" and self.is_asleep:
                weights.wake(self._llm, self._held)
                self._held = None
            return {"weight_version": self.version}
        if self.is_asleep:
            raise Asleep
        if name == "flush":
            return {"pages": self._llm.engine.forget_prefixes()}
        if name == "drop":
            self._staged = None
        elif self._staged is not None:
            weights.replace(self._llm, self._staged)
            self._staged = None
            given = fields["version"]
            self.version = self.version + 1 if given is None else given
        return {"weight_version": self.version}
