#!/usr/bin/env bash
# Builds the peers' environment in $PEERS_HOME/venv: about 1 GB, CPU only. Needs Python 3.11 and glibc 2.28 or newer.
set -eu
home=${PEERS_HOME:-$HOME/.cache/deadpool-peers}
mkdir -p "$home/downloads"
cd "$home"
${PYTHON:-python3.11} -m venv venv
pip=venv/bin/pip
$pip install -q torch==2.13.0 numpy==2.4.6
# The nightly of torchft: with 0.2.0 its DDP hook kills the survivor (ddp.py, "assert fut._fut").
$pip install -q --no-deps --pre torchft-nightly==2026.10.26
$pip install -q --no-deps lm-resiliency==0.2.0
# nvidia-resiliency-ext comes for Python 3.12 and glibc 2.39 only. What is used of it is pure Python: unpacked.
$pip download -q --no-deps -d downloads --platform manylinux_2_39_x86_64 --python-version 3.12 \
  --only-binary :all: nvidia-resiliency-ext==0.7.0
venv/bin/python -m zipfile -e downloads/nvidia_resiliency_ext-0.7.0-*.whl venv/lib/python3.11/site-packages
# What they import.
$pip install -q "opentelemetry-exporter-otlp-proto-http>=1.39" "opentelemetry-sdk>=1.39" defusedxml nvidia-ml-py \
  packaging "protobuf>=4.22" psutil pydantic pydantic-settings pyyaml setproctitle "grpcio>=1.76" httpx
$pip freeze > installed.txt
