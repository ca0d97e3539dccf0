# slime on a CPU: the demo, data preparation, rewards, `slime doctor`, `slime plan`, `slime watch`.
#   docker build -f docker/cpu.Dockerfile -t slime:cpu .
FROM python:3.11-slim

RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ make git wget \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /slime
COPY . .
RUN pip install --no-cache-dir --no-compile --constraint constraints.txt ".[gguf]"

ENTRYPOINT ["slime"]
CMD ["--help"]
