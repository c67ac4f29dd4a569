#!/usr/bin/env bash
# One ZooKeeper server on loopback, for a cluster on one machine: its data in DIR, its port PORT.
# The server comes with PySpark's jars; a real cluster runs three of them, on machines of their own.
set -euo pipefail

python=${1:?usage: zookeeper.sh PYTHON DIR PORT}
dir=${2:?}
port=${3:?}
command -v java >/dev/null || {
    echo "zookeeper: there is no Java on this machine (Debian, Ubuntu: apt-get install openjdk-17-jre-headless)" >&2
    exit 1
}
jars=$("$python" -c 'import os, pyspark; print(os.path.join(os.path.dirname(pyspark.__file__), "jars"))')
class_path=
for name in zookeeper-3 zookeeper-jute- slf4j-api- metrics-core- snappy-java-; do
    class_path+=$(echo "$jars/$name"*.jar):
done
mkdir -p "$dir"
cat > "$dir/zoo.cfg" <<END
dataDir=$dir
clientPort=$port
clientPortAddress=127.0.0.1
tickTime=500
admin.enableServer=false
maxClientCnxns=0
autopurge.purgeInterval=1
END
exec java -Xmx128m -XX:+UseSerialGC -cp "$class_path" org.apache.zookeeper.server.quorum.QuorumPeerMain "$dir/zoo.cfg"
