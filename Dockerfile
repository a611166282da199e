# docker build -t lit-vgrpo .
# docker run --gpus all -v "$PWD:/home/trainer/work" lit-vgrpo run tiny_shapes trainer.accelerator=gpu
# torch's wheel includes the CUDA libraries; the host needs the driver and the NVIDIA container toolkit.
FROM python:3.12-slim-bookworm

# g++ compiles code that torch.compile and DeepSpeed generate at run time; pinned versions vanish from the mirrors.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 trainer

ENV PYTHONUNBUFFERED=1
COPY . /opt/lit-vgrpo
WORKDIR /opt/lit-vgrpo
RUN pip install --no-cache-dir -c constraints.txt ".[rewards,data,memory]"

USER 10001
WORKDIR /home/trainer/work
ENTRYPOINT ["lightning"]
CMD ["--help"]
