# docker build -t ampacity .
FROM python:3.11-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM python:3.11-slim
COPY --from=build /wheel /wheel
COPY constraints.txt /wheel/
RUN python -m venv /opt/ampacity \
 && /opt/ampacity/bin/pip install --no-cache-dir --constraint /wheel/constraints.txt /wheel/*.whl \
 && rm -r /wheel \
 && useradd --uid 10001 --create-home ampacity \
 && mkdir /runs && chown ampacity /runs
USER 10001
WORKDIR /runs
ENV PATH=/opt/ampacity/bin:$PATH
ENTRYPOINT ["ampacity"]
CMD ["--help"]
