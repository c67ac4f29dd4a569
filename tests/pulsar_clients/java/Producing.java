import java.io.StringWriter;
import java.security.Key;
import java.security.KeyPair;
import java.security.KeyPairGenerator;
import java.util.ArrayList;
import java.util.Base64;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.BatcherBuilder;
import org.apache.pulsar.client.api.CompressionType;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.ConsumerCryptoFailureAction;
import org.apache.pulsar.client.api.HashingScheme;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.MessageIdAdv;
import org.apache.pulsar.client.api.MessageRoutingMode;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.ProducerAccessMode;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.client.impl.ChunkMessageIdImpl;
import org.bouncycastle.openssl.jcajce.JcaPEMWriter;

/** Producers: batches, chunks, delays, sequence ids, access modes, routing, encryption. */
final class Producing {

    public static Object oneMessage(Program p) throws Exception {
        String topic = p.topic();
        MessageId sent = p.producer(topic).newMessage().value(Program.bytes("a")).key("k").orderingKey(Program.bytes("o"))
                .property("x", "1").property("y", "").eventTime(12345).send();
        return Program.map("sent", p.id(sent, topic), "got", p.receive(p.consumer(topic), 1));
    }

    public static Object emptyAndNullMessages(Program p) throws Exception {
        String topic = p.topic();
        Producer<byte[]> producer = p.producer(topic);
        p.send(producer, "");
        producer.newMessage().key("k").value(null).send();
        Producer<byte[]> batching = p.batching(topic);
        CompletableFuture<?> sent = batching.newMessage().key("k").value(null).sendAsync();
        p.sendAll(batching, "", "a");
        sent.get();
        return p.receive(p.consumer(topic), 5);
    }

    public static Object manyMessagesInOrder(Program p) throws Exception {
        String topic = p.topic();
        Producer<byte[]> producer = p.producing(topic).enableBatching(true).maxPendingMessages(10_000).create();
        String[] contents = Program.numbered("message ", 5000);
        int ids = p.sendAll(producer, contents).stream().distinct().toList().size();
        return Program.map("ids", ids, "in order", p.texts(p.consumer(topic), 5000).equals(List.of(contents)));
    }

    public static Object batches(Program p) throws Exception {
        String topic = p.topic();
        Producer<byte[]> producer = p.batching(topic);
        List<Program.Id> one = p.sendAll(producer, "a", "b", "c");
        List<Program.Id> two = p.sendAll(producer, "d");
        List<Program.Id> three = p.send(p.producer(topic), "e");
        return Program.map("sent", List.of(one, two, three), "got", p.receive(p.consumer(topic), 5),
                "last", producer.getLastSequenceId());
    }

    public static Object batchesByKey(Program p) throws Exception {
        String topic = p.topic();
        Producer<byte[]> producer = p.producing(topic).enableBatching(true).batchingMaxPublishDelay(1, TimeUnit.MINUTES)
                .batcherBuilder(BatcherBuilder.KEY_BASED).create();
        List<CompletableFuture<MessageId>> sent = new ArrayList<>();
        for (String text : List.of("a1", "b1", "a2", "b2", "a3")) {
            sent.add(producer.newMessage().key(text.substring(0, 1)).value(Program.bytes(text)).sendAsync());
        }
        p.answered(producer, sent);
        Map<String, List<String>> byKey = new java.util.TreeMap<>();
        Map<String, List<Integer>> indexes = new java.util.TreeMap<>();
        for (Message<byte[]> message : p.next(p.consumer(topic), 5)) {
            byKey.computeIfAbsent(message.getKey(), key -> new ArrayList<>()).add(Program.text(message.getData()));
            indexes.computeIfAbsent(message.getKey(), key -> new ArrayList<>())
                    .add(((MessageIdAdv) message.getMessageId()).getBatchIndex());
        }
        return Program.map("by key", byKey, "indexes", indexes, "last", producer.getLastSequenceId());
    }

    public static Object compressed(Program p) throws Exception {
        Map<String, Object> found = new LinkedHashMap<>();
        String large = "x".repeat(20_000);
        for (CompressionType type : CompressionType.values()) {
            String topic = p.topic(type.name());
            Producer<byte[]> producer = p.producing(topic).enableBatching(true)
                    .batchingMaxPublishDelay(1, TimeUnit.MINUTES).compressionType(type).create();
            p.sendAll(producer, "a", large, "b");
            p.send(p.producing(topic).compressionType(type).create(), large);
            found.put(type.name(), p.texts(p.consumer(topic), 4));
        }
        return found;
    }

    private static Object chunk(Program p, Message<byte[]> message, String topic) {
        if (message.getMessageId() instanceof ChunkMessageIdImpl id) {
            return List.of(Program.text(message.getData()), p.id(id.getFirstChunkMessageId(), topic), p.id(id, topic));
        }
        return p.seen(message);
    }

    public static Object chunks(Program p) throws Exception {
        String topic = p.topic();
        Producer<byte[]> producer = p.producing(topic).enableChunking(true).chunkMaxMessageSize(1000).create();
        p.send(producer, "small", "y".repeat(3500), "z".repeat(2000));
        Consumer<byte[]> consumer = p.consumer(topic);
        List<Object> got = new ArrayList<>();
        List<Message<byte[]>> messages = p.next(consumer, 3);
        messages.forEach(message -> got.add(chunk(p, message, topic)));
        consumer.seek(messages.get(1).getMessageId());
        Object after = chunk(p, p.next(consumer), topic);
        consumer.acknowledge(messages.get(2));
        return Program.map("got", got, "after a seek", after, "entries", p.backlog(topic) >= 0);
    }

    public static Object chunksOfTheLargestSize(Program p) throws Exception {
        String topic = p.topic();
        Producer<byte[]> producer = p.producing(topic).enableChunking(true).create();
        p.send(producer, "y".repeat(12_000_000));
        Consumer<byte[]> consumer = p.shared(topic);
        List<String> got = p.texts(consumer, 1);
        return Program.map("got", got, "none is left", p.until("none is left", () -> p.backlog(topic) == 0));
    }

    public static Object chunksOfTwoProducers(Program p) throws Exception {
        String topic = p.topic();
        List<CompletableFuture<MessageId>> sent = new ArrayList<>();
        for (String name : List.of("y", "z")) {
            Producer<byte[]> producer = p.producing(topic).enableChunking(true).chunkMaxMessageSize(500).create();
            for (int at = 0; at < 5; at++) {
                sent.add(producer.sendAsync(Program.bytes((name + at).repeat(1000))));
            }
        }
        for (CompletableFuture<MessageId> one : sent) {
            one.get(Program.WAIT_S, TimeUnit.SECONDS);
        }
        List<String> got = p.texts(p.consumer(topic), 10);
        got.sort(null);
        return got;
    }

    public static Object aMessageThatIsTooLarge(Program p) throws Exception {
        String topic = p.topic();
        Producer<byte[]> producer = p.producer(topic);
        String failed = p.fails(() -> producer.send(new byte[5 * 1024 * 1024 + 1]));
        return Program.map("failed", failed, "then", p.send(producer, "a"));
    }

    @Program.Slow
    public static Object delayed(Program p) throws Exception {
        String topic = p.topic();
        Consumer<byte[]> consumer = p.shared(topic);
        Consumer<byte[]> exclusive = p.client().newConsumer().topic(topic).subscriptionName("e").subscribe();
        Producer<byte[]> producer = p.producer(topic);
        long began = System.currentTimeMillis();
        producer.newMessage().value(Program.bytes("late")).deliverAfter(7, TimeUnit.SECONDS).send();
        producer.newMessage().value(Program.bytes("soon")).deliverAt(began + 2000).send();
        producer.newMessage().value(Program.bytes("past")).deliverAt(began - 1000).send();
        p.send(producer, "now");
        List<String> first = p.texts(consumer, 2);
        List<String> ofTheOther = p.texts(exclusive, 4);
        List<String> soon = p.texts(consumer, 1);
        boolean soonEnough = System.currentTimeMillis() >= began + 1900;
        List<String> late = p.texts(consumer, 1);
        return Program.map("first", first, "soon", soon, "not early", soonEnough, "late", late,
                "not early either", System.currentTimeMillis() >= began + 6900, "exclusive", ofTheOther);
    }

    private static String deduplicated(Program p) throws Exception {
        return "persistent://" + p.namespace("deduplication", "true") + "/t";
    }

    public static Object duplicatesAreDropped(Program p) throws Exception {
        String topic = deduplicated(p);
        List<Object> sent = new ArrayList<>();
        Producer<byte[]> producer = p.producing(topic).producerName("anna").initialSequenceId(9).create();
        sent.add(producer.getLastSequenceId());
        for (long id : new long[] {10, 12, 11, 12, 20}) {
            sent.add(p.id(producer.newMessage().sequenceId(id).value(Program.bytes("" + id)).send(), topic));
        }
        producer.close();
        Producer<byte[]> again = p.producing(topic).producerName("anna").create();
        sent.add(again.getLastSequenceId());
        sent.add(p.id(again.newMessage().sequenceId(20).value(Program.bytes("20 again")).send(), topic));
        sent.addAll(p.send(again, "next"));
        sent.add(again.getLastSequenceId());
        return Program.map("sent", sent, "got", p.receive(p.consumer(topic), 4));
    }

    public static Object duplicatesAmongBatches(Program p) throws Exception {
        String topic = deduplicated(p);
        Producer<byte[]> producer = p.producing(topic).producerName("anna").enableBatching(true)
                .batchingMaxPublishDelay(1, TimeUnit.MINUTES).create();
        List<Object> sent = new ArrayList<>();
        for (long[] ids : new long[][] {{1, 2, 3}, {2, 3}, {4, 5}}) {
            List<CompletableFuture<MessageId>> batch = new ArrayList<>();
            for (long id : ids) {
                batch.add(producer.newMessage().sequenceId(id).value(Program.bytes("" + id)).sendAsync());
            }
            sent.add(p.answered(producer, batch));
        }
        Consumer<byte[]> consumer = p.consumer(topic);
        List<Object> got = p.receive(consumer, 5);
        return Program.map("sent", sent, "got", got, "then", p.nothing(consumer), "last", producer.getLastSequenceId());
    }

    public static Object duplicatesInChunks(Program p) throws Exception {
        String topic = deduplicated(p);
        Producer<byte[]> producer = p.producing(topic).producerName("anna").enableChunking(true)
                .chunkMaxMessageSize(1000).create();
        for (long id : new long[] {1, 1, 2}) {
            producer.newMessage().sequenceId(id).value(Program.bytes(("" + id).repeat(2500))).send();
        }
        Consumer<byte[]> consumer = p.consumer(topic);
        List<String> got = p.texts(consumer, 2);
        return Program.map("got", got, "then", p.nothing(consumer));
    }

    public static Object aProducerNameThatIsTaken(Program p) throws Exception {
        String topic = p.topic();
        Producer<byte[]> first = p.producing(topic).producerName("anna").create();
        String same = p.fails(() -> p.producing(topic).producerName("anna").create());
        String other = p.fails(() -> p.newClient().newProducer().topic(topic).producerName("anna").create());
        first.close();
        return List.of(same, other, p.fails(() -> p.producing(topic).producerName("anna").create()));
    }

    public static Object exclusiveAndASecond(Program p) throws Exception {
        String topic = p.topic();
        Producer<byte[]> first = p.producing(topic).accessMode(ProducerAccessMode.Exclusive).create();
        String exclusive = p.fails(() -> p.producing(topic).accessMode(ProducerAccessMode.Exclusive).create());
        String shared = p.fails(() -> p.producer(topic));
        first.close();
        p.producer(topic);
        String beside = p.fails(() -> p.producing(topic).accessMode(ProducerAccessMode.Exclusive).create());
        return Program.map("exclusive", exclusive, "shared", shared, "beside a shared one", beside);
    }

    public static Object waitingToBeExclusive(Program p) throws Exception {
        String topic = p.topic();
        Producer<byte[]> first = p.producing(topic).accessMode(ProducerAccessMode.Exclusive).create();
        CompletableFuture<Producer<byte[]>> second =
                p.producing(topic).accessMode(ProducerAccessMode.WaitForExclusive).createAsync();
        Thread.sleep(Program.NOTHING_MS);
        boolean early = second.isDone();
        p.send(first, "a");
        first.close();
        p.send(second.get(Program.WAIT_S, TimeUnit.SECONDS), "b");
        return Program.map("early", early, "got", p.texts(p.consumer(topic), 2));
    }

    public static Object fencingTheExclusiveOne(Program p) throws Exception {
        String topic = p.topic();
        Producer<byte[]> first = p.producing(topic).accessMode(ProducerAccessMode.Exclusive).create();
        p.send(first, "a");
        Producer<byte[]> second = p.newClient().newProducer().topic(topic).enableBatching(false)
                .accessMode(ProducerAccessMode.ExclusiveWithFencing).create();
        p.send(second, "b");
        String fenced = p.fails(() -> first.send(Program.bytes("c")));
        return Program.map("fenced", fenced, "got", p.texts(p.consumer(topic), 2));
    }

    /** Which partition each went to. */
    private static Object routed(Program p, Producer<byte[]> producer, int count, boolean keys) throws Exception {
        List<Object> found = new ArrayList<>();
        for (int at = 0; at < count; at++) {
            var message = producer.newMessage().value(Program.bytes("" + at));
            found.add(((MessageIdAdv) (keys ? message.key("key " + at) : message).send()).getPartitionIndex());
        }
        return found;
    }

    public static Object keysChoosePartitions(Program p) throws Exception {
        String topic = p.partitioned(5);
        Map<String, Object> found = new LinkedHashMap<>();
        for (HashingScheme scheme : HashingScheme.values()) {
            found.put(scheme.name(), routed(p, p.producing(topic).hashingScheme(scheme).create(), 20, true));
        }
        Consumer<byte[]> consumer = p.consumer(topic);
        found.put("got", p.texts(consumer, 40).size());
        return found;
    }

    public static Object partitionsInTurn(Program p) throws Exception {
        String topic = p.partitioned(3);
        Producer<byte[]> producer = p.producing(topic).messageRoutingMode(MessageRoutingMode.RoundRobinPartition).create();
        Producer<byte[]> single = p.producing(topic).messageRoutingMode(MessageRoutingMode.SinglePartition).create();
        List<?> turns = (List<?>) routed(p, producer, 6, false);
        List<?> one = (List<?>) routed(p, single, 6, false);
        return Program.map("all in turn", turns.subList(0, 3).equals(turns.subList(3, 6)) && turns.stream().distinct().count() == 3,
                "of one", one.stream().distinct().count(), "partitions", p.client().getPartitionsForTopic(topic).get()
                        .stream().map(p::shown).toList());
    }

    public static Object aProducerThatStartsLazily(Program p) throws Exception {
        String topic = p.partitioned(3);
        Producer<byte[]> producer = p.producing(topic).accessMode(ProducerAccessMode.Shared)
                .enableLazyStartPartitionedProducers(true).messageRoutingMode(MessageRoutingMode.SinglePartition).create();
        int before = p.admin("GET", Program.path(topic) + "/partitioned-stats", "").get("publishers").size();
        p.send(producer, "a");
        return Program.map("before", before, "got", p.texts(p.consumer(topic), 1));
    }

    public static Object statisticsOfAProducerAndAConsumer(Program p) throws Exception {
        String topic = p.topic();
        Consumer<byte[]> consumer = p.consumer(topic);
        Producer<byte[]> producer = p.producer(topic);
        p.send(producer, "a", "bb", "ccc");
        p.receive(consumer, 3);
        var sent = producer.getStats();
        var got = consumer.getStats();
        return Program.map("sent", sent.getTotalMsgsSent(), "bytes", sent.getTotalBytesSent(), "acks", sent.getTotalAcksReceived(),
                "got", got.getTotalMsgsReceived(), "acknowledged", got.getTotalAcksSent(), "bytes got", got.getTotalBytesReceived());
    }

    private static String pem(Key key) throws Exception {
        StringWriter text = new StringWriter();
        try (JcaPEMWriter writer = new JcaPEMWriter(text)) {
            writer.writeObject(key);
        }
        return "data:application/x-pem-file;base64," + Base64.getEncoder().encodeToString(Program.bytes(text.toString()));
    }

    public static Object encrypted(Program p) throws Exception {
        KeyPairGenerator generator = KeyPairGenerator.getInstance("RSA");
        generator.initialize(2048);
        KeyPair keys = generator.generateKeyPair();
        String topic = p.topic();
        Producer<byte[]> producer = p.producing(topic).addEncryptionKey("client")
                .defaultCryptoKeyReader(pem(keys.getPublic())).create();
        producer.newMessage().key("k").property("x", "1").value(Program.bytes("secret")).send();
        Producer<byte[]> batching = p.producing(topic).addEncryptionKey("client").enableBatching(true)
                .defaultCryptoKeyReader(pem(keys.getPublic()))
                .compressionType(CompressionType.LZ4).batchingMaxPublishDelay(1, TimeUnit.MINUTES).create();
        p.sendAll(batching, "a", "b", "c");
        p.send(p.producer(topic), "open");
        Map<String, Object> found = new LinkedHashMap<>();
        found.put("with the key", p.receive(p.consuming(topic)
                .defaultCryptoKeyReader(pem(keys.getPrivate())).subscribe(), 5));
        for (ConsumerCryptoFailureAction action : ConsumerCryptoFailureAction.values()) {
            Consumer<byte[]> consumer = p.consuming(topic).subscriptionName(action.name()).cryptoFailureAction(action).subscribe();
            found.put(action.name(), switch (action) {
                case FAIL -> p.nothing(consumer);
                case DISCARD -> p.texts(consumer, 1);
                case CONSUME -> {
                    List<Object> got = new ArrayList<>();
                    for (Message<byte[]> message : p.next(consumer, 3)) {
                        got.add(List.of(message.getEncryptionCtx().isPresent(), p.id(message.getMessageId(), topic)));
                    }
                    yield got;
                }
            });
        }
        return found;
    }

    public static Object aProducerThatIsClosed(Program p) throws Exception {
        Producer<byte[]> producer = p.producer(p.topic());
        producer.close();
        return List.of(p.fails(() -> producer.send(Program.bytes("a"))), producer.isConnected());
    }

    @Program.Slow
    public static Object aTransactionIsRefused(Program p) throws Exception {
        return p.fails(() -> p.newClient(settings -> settings.enableTransaction(true).operationTimeout(3, TimeUnit.SECONDS))
                .newTransaction().withTransactionTimeout(5, TimeUnit.SECONDS).build().get(Program.WAIT_S, TimeUnit.SECONDS));
    }
}
