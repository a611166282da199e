# docker build -t lit-vgrpo . && docker run --gpus all -v "$PWD:/home/trainer/work" lit-vgrpo run tiny_shapes
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# The base image's tag fixes the release; pinned package versions vanish from its mirrors with every security update.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv python3-dev g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 trainer

ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
COPY . /opt/lit-vgrpo
WORKDIR /opt/lit-vgrpo
RUN python3 -m venv /opt/venv && pip install --no-cache-dir -c constraints.txt ".[rewards,data,memory]"

USER 10001
WORKDIR /home/trainer/work
ENTRYPOINT ["lightning"]
CMD ["--help"]
