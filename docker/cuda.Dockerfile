# slime with SGLang on NVIDIA GPUs: trainer and engines of a run, on every node of a cluster.
#   docker build -f docker/cuda.Dockerfile -t slime:cuda .
# Python packages come from PyPI alone; the base image has the compiler that kernels are built with at the first launch.
# KubeRay's probes of a pod's health call wget.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

ENV DEBIAN_FRONTEND=noninteractive \
    PATH=/opt/slime/bin:$PATH

RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        python3 python3-dev python3-venv g++ git wget libnuma1 rdma-core libibverbs1 \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/slime

WORKDIR /slime
COPY . .
RUN names=$(sed -n 's/==.*//p' docker/cuda-constraints.txt | paste -sd '|') \
    && grep -vE "^($names)==" constraints.txt > /tmp/constraints.txt \
    && cat docker/cuda-constraints.txt >> /tmp/constraints.txt \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt ".[sglang]"

CMD ["bash"]
