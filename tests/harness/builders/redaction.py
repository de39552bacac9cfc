"""A spec with a secret in every field that can hold one."""

from __future__ import annotations

SECRET = "s3cr3t-v4lue"
WITH_SECRETS = {
    "nodes": [
        {
            "host": "gpu-a",
            "env": {"API_TOKEN": SECRET},
            "connection": {"command": ["connect", f"--password={SECRET}", "{host}"]},
        },
        {"host": "gpu-b", "ssh": {"proxy_jump": f"me:{SECRET}@jump,other:{SECRET}@[::1]:22"}},
    ],
    "program": {"command": ["train", "--token", SECRET]},
    "connection": {"command": ["teleport", f"--proxy=https://user:{SECRET}@host", "{host}"]},
    "ssh": {"proxy_jump": f"me:{SECRET}@jump"},
    "env": {"WANDB_API_KEY": SECRET},
    "notify": {"command": ["tell", f"--api-key={SECRET}"], "webhook": f"https://host/{SECRET}"},
}
