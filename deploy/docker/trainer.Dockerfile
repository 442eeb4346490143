# The trainer on DeepSpeed. The base image contains torch with CUDA and the compiler with which Triton builds attention
# kernels on first use (models with capped scores); for a CPU build set BASE=python:3.12.12-slim-bookworm.
ARG BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-devel
# hadolint ignore=DL3006
FROM ${BASE}

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY protocol protocol
COPY sandbox sandbox
COPY serving serving
COPY reward_service reward_service
COPY reward_model reward_model
COPY rollout_service rollout_service
COPY agents agents
COPY trainer trainer
COPY fine_tuning fine_tuning
COPY console console
COPY deploy deploy
COPY forensics forensics
COPY client client
COPY src src
# A torch in the base image is kept; deepspeed is built against the installed torch.
RUN pip install -c constraints.txt torch setuptools wheel numpy \
    && pip install -c constraints.txt --no-build-isolation deepspeed \
    && pip install -c constraints.txt '.[trainer]' \
    && useradd --uid 10001 --create-home penstock \
    && install -d -o penstock /runs
USER 10001
VOLUME /runs
ENTRYPOINT ["python", "-P", "-m"]
CMD ["penstock", "train", "/etc/penstock/run.toml"]
