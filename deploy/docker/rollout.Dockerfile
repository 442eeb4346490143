# A rollout worker. Target `worker` drives an SGLang server over HTTP and needs no torch; target
# `embedded` adds Penstock's torch engine for machines without a GPU. Build from the repository's root.
FROM python:3.12.12-slim-bookworm AS worker

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
RUN pip install -c constraints.txt '.[rollout]' \
    && useradd --uid 10001 --create-home penstock \
    && install -d -o penstock /cache
USER 10001
ENTRYPOINT ["python", "-P", "-m"]
CMD ["penstock.rollout_service"]

FROM worker AS embedded
USER 0
# Install torch first: its CPU build is small, other builds pull gigabytes. To get it, set TORCH_INDEX to
# the URL of an index with CPU builds; if unset, pip uses its default index.
ARG TORCH_INDEX=
RUN pip install -c constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch \
    && pip install -c constraints.txt '.[engine]'
USER 10001
