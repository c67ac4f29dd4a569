import java.util.ArrayList;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.BatcherBuilder;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.ConsumerEventListener;
import org.apache.pulsar.client.api.KeySharedPolicy;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.Range;
import org.apache.pulsar.client.api.SubscriptionType;

/** The four types of subscription, and who gets what. */
final class Subscribing {
    private static final Range LOWER = Range.of(0, 32767);
    private static final Range UPPER = Range.of(32768, 65535);

    private static List<String> texts(List<Message<byte[]>> messages) {
        return messages.stream().map(message -> Program.text(message.getData())).toList();
    }

    public static Object exclusiveIsForOne(Program p) throws Exception {
        String topic = p.topic();
        Consumer<byte[]> first = p.consumer(topic);
        String same = p.fails(() -> p.consumer(topic));
        String other = p.fails(() -> p.consuming(p.newClient(), topic).subscribe());
        p.send(p.producer(topic), "a");
        List<Object> got = p.receive(first, 1);
        first.close();
        return Program.map("same client", same, "other client", other, "got", got,
                "afterwards", p.fails(() -> p.consuming(p.newClient(), topic).subscribe()));
    }

    public static Object sharedGivesEachMessageOnce(Program p) throws Exception {
        String topic = p.topic();
        List<Consumer<byte[]>> consumers = new ArrayList<>();
        for (int at = 0; at < 3; at++) {
            consumers.add(p.consuming(p.newClient(), topic).subscriptionType(SubscriptionType.Shared)
                    .receiverQueueSize(10).subscribe());
        }
        String[] sent = Program.numbered("", 90);
        p.sendAll(p.producer(topic), sent);
        List<List<Message<byte[]>>> got = p.drained(consumers, 90);
        List<String> all = new ArrayList<>();
        got.forEach(one -> all.addAll(texts(one)));
        Collections.sort(all);
        return Program.map("all", all.equals(List.of(sent)), "each got some", got.stream().noneMatch(List::isEmpty),
                "in order", got.stream().allMatch(one -> texts(one).equals(texts(one).stream().sorted().toList())));
    }

    public static Object sharedByPriority(Program p) throws Exception {
        String topic = p.topic();
        List<Consumer<byte[]>> consumers = new ArrayList<>();
        for (int level : new int[] {0, 1}) {
            consumers.add(p.consuming(p.newClient(), topic).subscriptionType(SubscriptionType.Shared)
                    .receiverQueueSize(10).priorityLevel(level).subscribe());
        }
        p.send(p.producer(topic), Program.numbered("", 15));
        p.until("all are delivered", () -> p.stats(topic).get("subscriptions").get("s").get("unackedMessages").asInt() == 15);
        List<Integer> found = new ArrayList<>();
        for (List<Message<byte[]>> one : p.drained(consumers, 15)) {
            found.add(one.size());
        }
        return found;
    }

    public static Object sharedGivesBackWhatWasNotAcknowledged(Program p) throws Exception {
        String topic = p.topic();
        Consumer<byte[]> first = p.shared(topic);
        p.send(p.producer(topic), "a", "b", "c", "d");
        first.acknowledge(p.next(first, 4).get(1));
        p.until("one is acknowledged", () -> p.backlog(topic) == 3);
        Consumer<byte[]> second = p.consuming(p.newClient(), topic).subscriptionType(SubscriptionType.Shared).subscribe();
        first.close();
        List<Object> got = p.receive(second, 3);
        return Program.map("got", got, "then", p.nothing(second));
    }

    /** Who is active, as consumers are informed of it. */
    private record Events(String name, List<String> seen) implements ConsumerEventListener {
        @Override
        public void becameActive(Consumer<?> consumer, int partition) {
            seen.add(name + " active " + partition);
        }

        @Override
        public void becameInactive(Consumer<?> consumer, int partition) {
            seen.add(name + " inactive " + partition);
        }
    }

    private static String activeOne(Program p, String topic) throws Exception {
        return p.stats(topic).get("subscriptions").get("s").get("activeConsumerName").asText();
    }

    /** Which of them is active depends on the name of the topic. */
    public static Object failoverInformsOfTheActiveOne(Program p) throws Exception {
        String topic = p.topic();
        List<String> seen = Collections.synchronizedList(new ArrayList<>());
        Map<String, Consumer<byte[]>> consumers = new LinkedHashMap<>();
        List<Boolean> informed = new ArrayList<>();
        for (String name : List.of("a", "b", "c")) {
            consumers.put(name, p.consuming(p.newClient(), topic).subscriptionType(SubscriptionType.Failover)
                    .consumerName(name).consumerEventListener(new Events(name, seen)).subscribe());
            p.until("it is informed", () -> seen.stream().anyMatch(one -> one.startsWith(name)));
            String active = activeOne(p, topic);
            p.until("the active one is informed", () -> seen.contains(active + " active -1"));
            informed.add(name.equals(active) || seen.contains(name + " inactive -1"));
        }
        p.send(p.producer(topic), "1", "2");
        String first = activeOne(p, topic);
        Consumer<byte[]> consumer = consumers.get(first);
        consumer.acknowledge(p.next(consumer));
        p.until("one is acknowledged", () -> p.backlog(topic) == 1);
        seen.clear();
        consumer.close();
        p.until("the next is informed", () -> seen.stream().anyMatch(one -> one.contains(" active")));
        String second = activeOne(p, topic);
        return Program.map("informed", informed, "another", !second.equals(first),
                "of it", seen.contains(second + " active -1"), "got", p.receive(consumers.get(second), 1));
    }

    public static Object failoverByPriority(Program p) throws Exception {
        String topic = p.topic();
        List<String> seen = Collections.synchronizedList(new ArrayList<>());
        for (String name : List.of("low", "high")) {
            p.consuming(topic).subscriptionType(SubscriptionType.Failover).consumerName(name)
                    .priorityLevel(name.equals("high") ? 0 : 1).consumerEventListener(new Events(name, seen)).subscribe();
        }
        p.until("high is active", () -> seen.contains("high active -1"));
        return activeOne(p, topic);
    }

    private static Consumer<byte[]> keyShared(Program p, String topic, KeySharedPolicy policy) throws Exception {
        return p.consuming(p.newClient(), topic).subscriptionType(SubscriptionType.Key_Shared)
                .keySharedPolicy(policy).subscribe();
    }

    public static Object keySharedKeepsTheOrderOfAKey(Program p) throws Exception {
        String topic = p.topic();
        List<Consumer<byte[]>> consumers = new ArrayList<>();
        for (int at = 0; at < 3; at++) {
            consumers.add(keyShared(p, topic, KeySharedPolicy.autoSplitHashRange()));
        }
        Producer<byte[]> producer = p.producing(topic).enableBatching(true).batcherBuilder(BatcherBuilder.KEY_BASED).create();
        for (int at = 0; at < 200; at++) {
            producer.newMessage().key("k" + at % 20).value(Program.bytes(String.format("%03d", at))).sendAsync();
        }
        producer.flush();
        Map<String, TreeSet<Integer>> byKey = new TreeMap<>();
        boolean inOrder = true;
        List<List<Message<byte[]>>> got = p.drained(consumers, 200);
        for (int at = 0; at < 3; at++) {
            Map<String, String> last = new TreeMap<>();
            for (Message<byte[]> message : got.get(at)) {
                byKey.computeIfAbsent(message.getKey(), key -> new TreeSet<>()).add(at);
                String before = last.put(message.getKey(), Program.text(message.getData()));
                inOrder &= before == null || before.compareTo(Program.text(message.getData())) < 0;
            }
        }
        return Program.map("in order", inOrder, "keys", byKey.size(),
                "one consumer a key", byKey.values().stream().allMatch(one -> one.size() == 1));
    }

    public static Object stickyRanges(Program p) throws Exception {
        String topic = p.topic();
        List<Consumer<byte[]>> consumers = List.of(
                keyShared(p, topic, KeySharedPolicy.stickyHashRange().ranges(LOWER)),
                keyShared(p, topic, KeySharedPolicy.stickyHashRange().ranges(UPPER)));
        Producer<byte[]> producer = p.producer(topic);
        for (int at = 0; at < 20; at++) {
            producer.newMessage().key("k" + at).value(Program.bytes("k" + at)).send();
        }
        producer.newMessage().keyBytes(new byte[] {0, (byte) 255}).value(Program.bytes("bytes")).send();
        producer.newMessage().key("k0").orderingKey(Program.bytes("k1")).value(Program.bytes("ordered")).send();
        return p.drained(consumers, 22).stream().map(Subscribing::texts).toList();
    }

    public static Object stickyRangesThatOverlap(Program p) throws Exception {
        String topic = p.topic();
        keyShared(p, topic, KeySharedPolicy.stickyHashRange().ranges(LOWER));
        return Program.map(
                "overlapping", p.fails(() -> keyShared(p, topic, KeySharedPolicy.stickyHashRange().ranges(Range.of(32767, 40000)))),
                "none", p.fails(() -> keyShared(p, topic, KeySharedPolicy.stickyHashRange())),
                "the rest", p.fails(() -> keyShared(p, topic, KeySharedPolicy.stickyHashRange().ranges(UPPER))));
    }

    public static Object stickyBesideAutomatic(Program p) throws Exception {
        String topic = p.topic();
        keyShared(p, topic, KeySharedPolicy.stickyHashRange().ranges(LOWER));
        return p.fails(() -> keyShared(p, topic, KeySharedPolicy.autoSplitHashRange()));
    }

    public static Object keySharedWithMixedBatches(Program p) throws Exception {
        String topic = p.topic();
        Consumer<byte[]> consumer = keyShared(p, topic, KeySharedPolicy.autoSplitHashRange());
        Producer<byte[]> producer = p.batching(topic);
        for (int at = 0; at < 6; at++) {
            producer.newMessage().key("k" + at % 3).value(Program.bytes("" + at)).sendAsync();
        }
        producer.flush();
        return p.receive(consumer, 6);
    }

    public static Object typesThatDoNotGoTogether(Program p) throws Exception {
        Map<String, Object> found = new LinkedHashMap<>();
        for (SubscriptionType first : SubscriptionType.values()) {
            String topic = p.topic(first.name());
            p.consuming(topic).subscriptionType(first).subscribe();
            for (SubscriptionType second : SubscriptionType.values()) {
                if (first != second) {
                    found.put(first + " " + second, p.fails(() -> p.consuming(topic).subscriptionType(second).subscribe()));
                }
            }
        }
        return found;
    }

    public static Object unsubscribing(Program p) throws Exception {
        String topic = p.topic();
        Consumer<byte[]> first = p.shared(topic);
        Consumer<byte[]> second = p.shared(topic);
        p.send(p.producer(topic), "a");
        String beside = p.fails(() -> {
            first.unsubscribe();
            return null;
        });
        second.close();
        String alone = p.fails(() -> {
            first.unsubscribe();
            return null;
        });
        return Program.map("beside another", beside, "alone", alone, "left", p.stats(topic).get("subscriptions").size());
    }

    public static Object unsubscribingByForce(Program p) throws Exception {
        String topic = p.topic();
        Consumer<byte[]> first = p.shared(topic);
        p.consuming(p.newClient(), topic).subscriptionType(SubscriptionType.Shared).subscribe().close();
        Consumer<byte[]> second = p.consuming(p.newClient(), topic).subscriptionType(SubscriptionType.Shared).subscribe();
        p.send(p.producer(topic), "a", "b");
        second.pause();
        return Program.map("by force", p.fails(() -> {
            first.unsubscribe(true);
            return null;
        }));
    }

    public static Object aSubscriptionThatDoesNotLast(Program p) throws Exception {
        String topic = p.topic();
        Consumer<byte[]> consumer = p.consuming(topic)
                .subscriptionMode(org.apache.pulsar.client.api.SubscriptionMode.NonDurable).subscribe();
        p.send(p.producer(topic), "a", "b");
        List<Object> got = p.receive(consumer, 2);
        Object durable = p.stats(topic).get("subscriptions").get("s").get("durable").asBoolean();
        consumer.close();
        p.until("it is gone", () -> p.stats(topic).get("subscriptions").size() == 0);
        return Program.map("got", got, "durable", durable);
    }

    public static Object propertiesOfASubscription(Program p) throws Exception {
        String topic = p.topic();
        p.consuming(topic).subscriptionProperties(Map.of("x", "1")).property("of", "the consumer").consumerName("anna")
                .subscribe();
        var subscription = p.stats(topic).get("subscriptions").get("s");
        var consumer = subscription.get("consumers").get(0);
        return Program.map("subscription", subscription.get("subscriptionProperties"), "consumer", consumer.get("metadata"),
                "name", consumer.get("consumerName"));
    }

    /** What administration and figures say of them. */
    private static Object propertiesOf(Program p, String topic) throws Exception {
        return List.of(p.admin("GET", Program.path(topic) + "/subscription/s/properties", ""),
                p.stats(topic).get("subscriptions").get("s").get("subscriptionProperties"));
    }

    public static Object propertiesOfASubscriptionThatIsThere(Program p) throws Exception {
        String topic = p.topic();
        List<Object> found = new ArrayList<>();
        for (var properties : List.of(Map.of("x", "1", "u", "\u00fc"), Map.of("x", "2"), Map.of("y", "3"), Map.<String, String>of())) {
            p.consuming(topic).subscriptionProperties(properties).subscribe().close();
            found.add(propertiesOf(p, topic));
        }
        p.admin("PUT", Program.path(topic) + "/subscription/s/properties", "{\"z\": \"4\", \"empty\": \"\"}");
        found.add(propertiesOf(p, topic));
        p.consuming(topic).subscribe().seek(MessageId.earliest);
        p.admin("PUT", Program.path(topic) + "/unload", "");
        p.until("it is there again", () -> p.fails(() -> p.stats(topic)).equals("no error"));
        found.add(propertiesOf(p, topic));
        p.admin("PUT", Program.path(topic) + "/subscription/s/properties", "{}");
        found.add(propertiesOf(p, topic));
        return found;
    }

    public static Object propertiesOfASubscriptionThatHadNone(Program p) throws Exception {
        String topic = p.topic();
        p.consumer(topic).close();
        List<Object> found = new ArrayList<>(List.of(propertiesOf(p, topic)));
        for (var properties : List.of(Map.of("x", "1"), Map.of("y", "2"))) {
            p.consuming(topic).subscriptionProperties(properties).subscribe().close();
            found.add(propertiesOf(p, topic));
        }
        p.admin("PUT", Program.path(topic) + "/unload", "");
        p.until("it is there again", () -> p.fails(() -> p.stats(topic)).equals("no error"));
        found.add(propertiesOf(p, topic));
        return found;
    }

    public static Object closedAndOpenedAgain(Program p) throws Exception {
        String topic = p.topic();
        Consumer<byte[]> consumer = p.consumer(topic);
        Producer<byte[]> producer = p.producer(topic);
        List<Object> found = new ArrayList<>();
        for (String text : List.of("a", "b", "c")) {
            p.send(producer, text);
            consumer.close();
            consumer = p.consumer(topic);
            found.add(p.receive(consumer, 1));
        }
        Consumer<byte[]> closed = consumer;
        closed.close();
        return Program.map("got", found, "afterwards", p.fails(() -> closed.receive(1, TimeUnit.SECONDS)),
                "acknowledging", p.fails(() -> {
                    closed.acknowledge(MessageId.earliest);
                    return null;
                }));
    }
}
