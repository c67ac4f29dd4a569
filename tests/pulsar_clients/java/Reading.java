import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.BatcherBuilder;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.Range;
import org.apache.pulsar.client.api.Reader;
import org.apache.pulsar.client.api.ReaderBuilder;
import org.apache.pulsar.client.api.TableView;

/** Readers, compaction, table views. */
final class Reading {

    public static Object aReaderFromTheEnds(Program p) throws Exception {
        String topic = p.topic();
        Producer<byte[]> producer = p.producer(topic);
        p.send(producer, "a", "b");
        Reader<byte[]> latest = p.reading(topic).startMessageId(MessageId.latest).create();
        boolean available = latest.hasMessageAvailable();
        p.send(producer, "c");
        Reader<byte[]> last = p.reading(topic).startMessageId(MessageId.latest).startMessageIdInclusive().create();
        return Program.map("earliest", p.read(p.reading(topic).create()), "latest", p.read(latest),
                "was available", available, "the last, inclusively", p.read(last));
    }

    public static Object aReaderFromAMessage(Program p) throws Exception {
        String topic = p.topic();
        p.send(p.producer(topic), "a");
        Producer<byte[]> producer = p.batching(topic);
        p.sendAll(producer, "b", "c", "d");
        p.sendAll(producer, "e");
        List<MessageId> ids = new ArrayList<>();
        Reader<byte[]> all = p.reading(topic).create();
        for (int at = 0; at < 5; at++) {
            ids.add(MessageId.fromByteArray(all.readNext(Program.WAIT_S, TimeUnit.SECONDS).getMessageId().toByteArray()));
        }
        Map<String, Object> found = new LinkedHashMap<>();
        for (int at = 0; at < 5; at++) {
            ReaderBuilder<byte[]> settings = p.reading(topic).startMessageId(ids.get(at));
            found.put("after " + at, p.read(settings.create()));
            found.put("from " + at, p.read(settings.startMessageIdInclusive().create()));
        }
        return found;
    }

    public static Object aReaderSeeks(Program p) throws Exception {
        String topic = p.topic();
        Producer<byte[]> producer = p.producer(topic);
        p.send(producer, "a", "b");
        Thread.sleep(100);
        MessageId third = producer.send(Program.bytes("c"));
        p.send(producer, "d");
        Reader<byte[]> reader = p.reading(topic).create();
        List<Object> found = new ArrayList<>(p.read(reader));
        reader.seek(third);
        found.add(p.read(reader));
        reader.seek(MessageId.earliest);
        found.add(p.read(reader));
        reader.seek(MessageId.latest);
        found.add(p.read(reader));
        reader.seek(0);
        found.add(p.read(reader));
        reader.seek(System.currentTimeMillis() + 3_600_000);
        found.add(reader.hasMessageAvailable());
        reader.seek(partition -> third);
        found.add(p.read(reader));
        return found;
    }

    public static Object aReaderSeeksToATime(Program p) throws Exception {
        String topic = p.topic();
        Producer<byte[]> producer = p.producer(topic);
        p.send(producer, "a", "b");
        Thread.sleep(100);
        long at = System.currentTimeMillis();
        Thread.sleep(100);
        p.send(producer, "c");
        Reader<byte[]> reader = p.reading(topic).create();
        reader.seek(at);
        List<Object> found = new ArrayList<>(p.read(reader));
        found.add(p.read(p.reading(topic).startMessageId(null).startMessageFromRollbackDuration(1, TimeUnit.HOURS).create()));
        return found;
    }

    public static Object aReaderOfPartitions(Program p) throws Exception {
        String topic = p.partitioned(3);
        p.send(p.producer(topic), Program.numbered("", 9));
        List<String> found = new ArrayList<>();
        p.read(p.reading(topic).create()).forEach(one -> found.add((String) ((Map<?, ?>) one).get("data")));
        found.sort(null);
        return Program.map("all", found, "one", p.read(p.reading(topic + "-partition-1").create()).size());
    }

    public static Object aReaderOfARangeOfHashes(Program p) throws Exception {
        String topic = p.topic();
        Producer<byte[]> producer = p.producer(topic);
        for (int at = 0; at < 10; at++) {
            producer.newMessage().key("k" + at).value(Program.bytes("" + at)).send();
        }
        List<Object> found = new ArrayList<>();
        for (Range range : List.of(LOWER, UPPER)) {
            found.add(untilSilent(p.reading(topic).keyHashRange(range).create()));
        }
        return found;
    }

    private static final Range LOWER = Range.of(0, 32767);
    private static final Range UPPER = Range.of(32768, 65535);

    private static List<String> untilSilent(Reader<byte[]> reader) throws Exception {
        List<String> got = new ArrayList<>();
        for (var message = reader.readNext(2, TimeUnit.SECONDS); message != null; message = reader.readNext(1, TimeUnit.SECONDS)) {
            got.add(Program.text(message.getData()));
        }
        return got;
    }

    public static Object readersOfRangesOfHashesAndBatches(Program p) throws Exception {
        Map<String, Object> found = new LinkedHashMap<>();
        for (BatcherBuilder kind : List.of(BatcherBuilder.KEY_BASED, BatcherBuilder.DEFAULT)) {
            String topic = p.topic(kind == BatcherBuilder.DEFAULT ? "mixed" : "by-key");
            Producer<byte[]> producer = p.producing(topic).enableBatching(true).batcherBuilder(kind)
                    .batchingMaxPublishDelay(1, TimeUnit.MINUTES).create();
            for (int at = 0; at < 30; at++) {
                producer.newMessage().key("k" + at % 10).value(Program.bytes("" + at)).sendAsync();
                if (at % 15 == 14) {
                    producer.flush();
                }
            }
            for (Range range : List.of(LOWER, UPPER)) {
                List<String> got = untilSilent(p.reading(topic).keyHashRange(range).receiverQueueSize(1).create());
                got.sort(null); // batches by key are sent in the order of a hash map
                found.put(topic.substring(topic.lastIndexOf('-')) + " " + range, got);
            }
        }
        return found;
    }

    public static Object aReaderOfARangeOfHashesSeeks(Program p) throws Exception {
        String topic = p.topic();
        Producer<byte[]> producer = p.producer(topic);
        for (int at = 0; at < 10; at++) {
            producer.newMessage().key("k" + at).value(Program.bytes("" + at)).send();
        }
        Reader<byte[]> reader = p.reading(topic).keyHashRange(UPPER).create();
        List<Object> found = new ArrayList<>(List.of(untilSilent(reader)));
        reader.seek(MessageId.earliest);
        found.add(untilSilent(reader));
        reader.seek(MessageId.latest);
        for (int at = 10; at < 20; at++) {
            producer.newMessage().key("k" + at).value(Program.bytes("" + at)).send();
        }
        found.add(untilSilent(reader));
        return found;
    }

    public static Object aReaderOfSomeRangesOfHashes(Program p) throws Exception {
        String topic = p.topic();
        Producer<byte[]> producer = p.producer(topic);
        for (int at = 0; at < 20; at++) {
            producer.newMessage().key("k" + at).value(Program.bytes("" + at)).send();
        }
        return untilSilent(p.reading(topic).keyHashRange(Range.of(0, 9999), Range.of(40000, 49999)).create());
    }

    public static Object readersOfRangesOfHashesAndOtherKeys(Program p) throws Exception {
        String topic = p.topic();
        Producer<byte[]> producer = p.producing(topic).producerName("p").create();
        for (int at = 0; at < 10; at++) {
            producer.newMessage().value(Program.bytes("without " + at)).send();
        }
        for (int at = 0; at < 5; at++) {
            producer.newMessage().keyBytes(new byte[] {0, (byte) (255 - at)}).value(Program.bytes("bytes " + at)).send();
            producer.newMessage().key("k0").orderingKey(Program.bytes("k" + at)).value(Program.bytes("ordered " + at)).send();
        }
        return List.of(untilSilent(p.reading(topic).keyHashRange(LOWER).create()),
                untilSilent(p.reading(topic).keyHashRange(UPPER).create()));
    }

    public static Object aReaderOfARangeOfHashesOfPartitions(Program p) throws Exception {
        String topic = p.partitioned(3);
        Producer<byte[]> producer = p.producer(topic);
        for (int at = 0; at < 20; at++) {
            producer.newMessage().key("k" + at).value(Program.bytes("" + at)).send();
        }
        List<String> got = untilSilent(p.reading(topic).keyHashRange(LOWER).create());
        got.sort(null);
        return got;
    }

    public static Object aReaderOfRangesOfHashesThatAreNone(Program p) throws Exception {
        String topic = p.topic();
        return Program.map(
                "none", p.fails(() -> p.reading(topic).keyHashRange().create()),
                "backwards", p.fails(() -> p.reading(topic).keyHashRange(Range.of(10, 0)).create()),
                "too high", p.fails(() -> p.reading(topic).keyHashRange(Range.of(0, 65536)).create()),
                "far too high", p.fails(() -> p.reading(topic).keyHashRange(Range.of(0, 70000)).create()),
                "below 0", p.fails(() -> p.reading(topic).keyHashRange(Range.of(-1, 5)).create()),
                "overlapping", p.fails(() -> p.reading(topic).keyHashRange(Range.of(0, 10), Range.of(5, 20)).create()),
                "one", p.fails(() -> p.reading(topic).keyHashRange(Range.of(7, 7)).create()));
    }

    public static Object aReaderWithAListener(Program p) throws Exception {
        String topic = p.topic();
        List<Object> got = java.util.Collections.synchronizedList(new ArrayList<>());
        p.reading(topic).readerName("anna").readerListener((reader, message) -> got.add(p.seen(message))).create();
        p.send(p.producer(topic), "a", "b");
        p.until("all came", () -> got.size() == 2);
        return got;
    }

    private static void compact(Program p, String topic) throws Exception {
        p.admin("PUT", Program.path(topic) + "/compaction", "");
        p.until("it is compacted", () -> {
            String status = p.admin("GET", Program.path(topic) + "/compaction", "").get("status").asText();
            if (status.equals("ERROR")) {
                throw new IllegalStateException("the compaction failed");
            }
            return status.equals("SUCCESS");
        });
    }

    private static void put(Producer<byte[]> producer, String key, String value) throws Exception {
        producer.newMessage().key(key).value(value == null ? null : Program.bytes(value)).send();
    }

    public static Object readingCompacted(Program p) throws Exception {
        String topic = p.topic();
        Producer<byte[]> producer = p.producer(topic);
        put(producer, "a", "1");
        put(producer, "b", "1");
        put(producer, "a", "2");
        put(producer, "c", "1");
        put(producer, "b", null);
        p.send(producer, "without a key");
        compact(p, topic);
        put(producer, "a", "3");
        Consumer<byte[]> consumer = p.consuming(topic).readCompacted(true).subscribe();
        List<Object> compacted = new ArrayList<>();
        Reader<byte[]> reader = p.reading(topic).readCompacted(true).create();
        compacted.addAll(p.read(reader));
        return Program.map("reader", compacted, "consumer", p.receive(consumer, compacted.size()), "then", p.nothing(consumer),
                "plain", p.read(p.reading(topic).create()).size());
    }

    public static Object readingCompactedBatches(Program p) throws Exception {
        String topic = p.topic();
        Producer<byte[]> producer = p.batching(topic);
        for (String keys : List.of("abca", "abd")) {
            for (String key : keys.split("")) {
                producer.newMessage().key(key).value(Program.bytes(key + keys.length())).sendAsync();
            }
            producer.flush();
        }
        compact(p, topic);
        return p.read(p.reading(topic).readCompacted(true).create());
    }

    public static Object readingCompactedIsNotForShared(Program p) throws Exception {
        return p.fails(() -> p.consuming(p.topic()).readCompacted(true)
                .subscriptionType(org.apache.pulsar.client.api.SubscriptionType.Shared).subscribe());
    }

    public static Object aTableView(Program p) throws Exception {
        String topic = p.topic();
        Producer<byte[]> producer = p.producer(topic);
        put(producer, "a", "1");
        put(producer, "b", "1");
        put(producer, "a", "2");
        compact(p, topic);
        TableView<byte[]> view = p.client().newTableView().topic(topic).create();
        Map<String, String> first = new TreeMap<>();
        view.forEach((key, value) -> first.put(key, Program.text(value)));
        Map<String, String> listened = java.util.Collections.synchronizedMap(new TreeMap<>());
        view.listen((key, value) -> listened.put(key, Program.text(value)));
        put(producer, "c", "1");
        put(producer, "b", null);
        p.until("the view follows", () -> view.size() == 2 && view.containsKey("c"));
        put(producer, "d", "1");
        view.refresh();
        Map<String, String> then = new TreeMap<>();
        view.forEach((key, value) -> then.put(key, Program.text(value)));
        return Program.map("first", first, "then", then, "listened", listened);
    }

    public static Object aTableViewOfPartitions(Program p) throws Exception {
        String topic = p.partitioned(3);
        Producer<byte[]> producer = p.producer(topic);
        for (int at = 0; at < 9; at++) {
            put(producer, "k" + at % 5, "" + at);
        }
        Map<String, String> found = new TreeMap<>();
        p.client().newTableView().topic(topic).create().forEach((key, value) -> found.put(key, Program.text(value)));
        return found;
    }
}
