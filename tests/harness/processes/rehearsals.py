"""Specs that are rehearsed on this machine."""

from __future__ import annotations

REAL = """
name: real
nodes:
  - {host: gpu-a, address: 10.0.0.11, gpus: [0, 1], gpus_per_worker: 2, python: /opt/python, tasks: {chief: 1}}
  - {host: me@GPU-B.example.org, addresses: [10.0.0.12, 10.1.0.12], port: 2222, tasks: {worker: 2, evaluator: 1}}
  - {host: 10.0.0.13, env: {A: b}, ssh: {port: 2200}}
program: {script: train.py, args: ["$HOME"]}
ssh: {user: me, identity_file: ~/.ssh/cluster}
host_keys: accept-new
env_from: [WANDB_API_KEY]
"""
