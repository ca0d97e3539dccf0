"""An engine that holds a base and adapters, and computes nothing; as `FakeWeightEngine`.

with FakeAdapterEngine(base) as engine:
    sync.connect([engine.url]); sync.push()
    assert list(engine.adapters) == ["policy-1"]
"""

from __future__ import annotations

import base64
import dataclasses
import pickle
from typing import Any

import torch

from slime.embedded.weight_update import ABILITIES
from slime.engines.wire.buckets import fingerprint
from tests.support.fake_weight_engine import FakeWeightEngine


class FakeAdapterEngine(FakeWeightEngine):
    """
    Attributes:
        adapters: name → its tensors, in the order of loading; configs: name → its config.
        weight_version: that it was told last.
        base_checks: how often it was asked for its base.
    """

    def __init__(self, base: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__(base, dtype)
        self.abilities = dataclasses.replace(ABILITIES, adapters=True)
        self.adapters: dict[str, dict[str, torch.Tensor]] = {}
        self.configs: dict[str, dict[str, Any]] = {}
        self.weight_version = "0"
        self.base_checks = 0

    def _handle(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/load_lora_adapter_from_tensors":
            name = body["lora_name"]
            if name in self.adapters:
                return self._refuse(f"Failed to load {name} because it is already loaded")
            tensors = pickle.loads(base64.b64decode(body["serialized_tensors"]))
            self.adapters[name] = {one: tensor.clone() for one, tensor in tensors.items()}
            self.configs[name] = body["config_dict"]
            return {"loaded_adapters": dict.fromkeys(self.adapters, "__tensor__")}
        if path == "/unload_lora_adapter":
            if self.adapters.pop(body["lora_name"], None) is None:
                return self._refuse(f"{body['lora_name']} does not exist")
            return {"loaded_adapters": dict.fromkeys(self.adapters, "__tensor__")}
        if path == "/update_weight_version":
            self.weight_version = body["new_version"]
        if path == "/weights_checker" and body.get("lora_name"):
            held = self.adapters[body["lora_name"]]
            if self.corrupt is not None:
                self.corrupt(held)
            return {"fingerprints": {name: fingerprint(tensor) for name, tensor in held.items()}}
        self.base_checks += path == "/weights_checker"
        return super()._handle(path, body)

    @staticmethod
    def _refuse(message: str) -> dict[str, Any]:
        return {"success": False, "error_message": message}
