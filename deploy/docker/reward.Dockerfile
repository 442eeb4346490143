# The reward service, the bootstrap job, and what writes the targets of Prometheus: no torch, no GPU. Build from the repository's root.
FROM python:3.12.12-slim-bookworm

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
RUN pip install -c constraints.txt '.[reward]' \
    && useradd --uid 10001 --create-home penstock \
    && install -d -o penstock /targets
USER 10001
EXPOSE 8700
ENTRYPOINT ["python", "-P", "-m"]
CMD ["penstock.reward_service"]
