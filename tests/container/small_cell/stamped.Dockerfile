
FROM base AS small-runtime
RUN mkdir /opt/small \
 && echo same > /opt/small/same \
 && date +%s%N > /opt/small/stamp
