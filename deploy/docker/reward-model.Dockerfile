# A reward model served as a reward endpoint: torch and transformers, no NATS or S3 client needed. Build from the repository's root.
# With CUDA: BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime; the torch of the base image is kept.
ARG BASE=python:3.12.12-slim-bookworm
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
# Install torch first: its CPU build is small, other builds pull gigabytes. To get it, set TORCH_INDEX to
# the URL of an index with CPU builds; if unset, pip uses its default index.
ARG TORCH_INDEX=
RUN pip install -c constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch \
    && pip install -c constraints.txt '.[reward-model]' \
    && useradd --uid 10001 --create-home penstock
USER 10001
EXPOSE 8710
ENTRYPOINT ["python", "-P", "-m"]
CMD ["penstock.reward_model", "/reward-model"]
