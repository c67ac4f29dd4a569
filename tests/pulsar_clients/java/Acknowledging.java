import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.ConsumerBuilder;
import org.apache.pulsar.client.api.DeadLetterPolicy;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.client.impl.MultiplierRedeliveryBackoff;

/** Acknowledgement, redelivery, retries, dead letters, seek. */
final class Acknowledging {
    private static final SubscriptionType[] TYPES = SubscriptionType.values();

    /** Closes a consumer that leaves a backlog, and shows what the next one gets. */
    private static Object again(Program p, String topic, Consumer<byte[]> consumer, int count, int left) throws Exception {
        p.until(left + " are left", () -> p.backlog(topic) == left);
        consumer.close();
        Consumer<byte[]> next = p.consumer(topic);
        List<Object> got = new ArrayList<>();
        for (Message<byte[]> message : p.next(next, count)) {
            got.add(p.seen(message));
        }
        return Program.map("again", got, "then", p.nothing(next));
    }

    public static Object acknowledgedOneByOne(Program p) throws Exception {
        String topic = p.topic();
        Consumer<byte[]> consumer = p.consumer(topic);
        p.send(p.producer(topic), "a", "b", "c", "d", "e", "f");
        List<Message<byte[]>> messages = p.next(consumer, 6);
        for (int at : new int[] {0, 2, 3}) {
            consumer.acknowledge(messages.get(at));
        }
        return again(p, topic, consumer, 3, 3);
    }

    public static Object acknowledgedCumulatively(Program p) throws Exception {
        String topic = p.topic();
        Consumer<byte[]> consumer = p.consumer(topic);
        p.send(p.producer(topic), "a", "b", "c", "d", "e", "f");
        consumer.acknowledgeCumulative(p.next(consumer, 6).get(3));
        return again(p, topic, consumer, 2, 2);
    }

    public static Object acknowledgedAsAList(Program p) throws Exception {
        String topic = p.topic();
        Consumer<byte[]> consumer = p.consumer(topic);
        p.send(p.producer(topic), "a", "b", "c", "d", "e");
        List<MessageId> ids = p.next(consumer, 5).stream().map(Message::getMessageId).toList();
        consumer.acknowledge(List.of(ids.get(4), ids.get(0), ids.get(2)));
        return again(p, topic, consumer, 2, 2);
    }

    public static Object acknowledgedWithAReceipt(Program p) throws Exception {
        String topic = p.topic();
        ConsumerBuilder<byte[]> settings = p.consuming(topic).isAckReceiptEnabled(true)
                .acknowledgmentGroupTime(0, TimeUnit.MILLISECONDS);
        Consumer<byte[]> consumer = settings.subscribe();
        p.send(p.producer(topic), "a", "b", "c");
        List<Message<byte[]>> messages = p.next(consumer, 3);
        consumer.acknowledgeAsync(messages.get(1)).get(Program.WAIT_S, TimeUnit.SECONDS);
        int afterOne = p.backlog(topic);
        consumer.acknowledgeCumulativeAsync(messages.get(2)).get(Program.WAIT_S, TimeUnit.SECONDS);
        return List.of(afterOne, p.backlog(topic));
    }

    public static Object cumulativeIsNotForShared(Program p) throws Exception {
        String topic = p.topic();
        Consumer<byte[]> consumer = p.shared(topic);
        p.send(p.producer(topic), "a");
        Message<byte[]> message = p.next(consumer);
        return p.fails(() -> {
            consumer.acknowledgeCumulative(message);
            return null;
        });
    }

    public static Object acknowledgedByBatchIndex(Program p) throws Exception {
        String topic = p.topic();
        ConsumerBuilder<byte[]> settings = p.consuming(topic).subscriptionType(SubscriptionType.Shared)
                .enableBatchIndexAcknowledgment(true).isAckReceiptEnabled(true);
        Consumer<byte[]> consumer = settings.subscribe();
        p.sendAll(p.batching(topic), "a", "b", "c", "d", "e", "f");
        List<Message<byte[]>> messages = p.next(consumer, 6);
        for (int at : new int[] {0, 2, 5}) {
            consumer.acknowledge(messages.get(at));
        }
        consumer.close();
        Consumer<byte[]> next = settings.subscribe();
        return Program.map("again", p.receive(next, 3), "then", p.nothing(next));
    }

    public static Object acknowledgedCumulativelyWithinABatch(Program p) throws Exception {
        String topic = p.topic();
        ConsumerBuilder<byte[]> settings = p.consuming(topic).enableBatchIndexAcknowledgment(true).isAckReceiptEnabled(true);
        Consumer<byte[]> consumer = settings.subscribe();
        Producer<byte[]> producer = p.batching(topic);
        p.sendAll(producer, "a", "b", "c");
        p.sendAll(producer, "d", "e", "f", "g");
        consumer.acknowledgeCumulative(p.next(consumer, 7).get(4));
        consumer.close();
        Consumer<byte[]> next = settings.subscribe();
        return Program.map("again", p.receive(next, 2), "then", p.nothing(next));
    }

    /** Java says so of the previous batch as well, whose last entry it computes. */
    public static Object acknowledgedCumulativelyWithinABatchWithoutIndexes(Program p) throws Exception {
        String topic = p.topic();
        Consumer<byte[]> consumer = p.consumer(topic);
        Producer<byte[]> producer = p.batching(topic);
        p.sendAll(producer, "a", "b", "c");
        p.sendAll(producer, "d", "e", "f", "g");
        consumer.acknowledgeCumulative(p.next(consumer, 7).get(4));
        p.until("the first batch is acknowledged", () -> List.of(1, 4).contains(p.backlog(topic))); // entries, or messages
        consumer.close();
        Consumer<byte[]> next = p.consumer(topic);
        return Program.map("again", p.receive(next, 4), "then", p.nothing(next));
    }

    public static Object negativelyAcknowledged(Program p) throws Exception {
        Map<String, Object> found = new LinkedHashMap<>();
        for (SubscriptionType type : TYPES) {
            String topic = p.topic(type.name());
            Consumer<byte[]> consumer = p.consuming(topic).subscriptionType(type)
                    .negativeAckRedeliveryDelay(100, TimeUnit.MILLISECONDS).subscribe();
            p.send(p.producer(topic), "a", "b", "c", "d");
            List<Message<byte[]>> messages = p.next(consumer, 4);
            for (int at : new int[] {0, 1, 3}) {
                consumer.acknowledge(messages.get(at));
            }
            consumer.negativeAcknowledge(messages.get(2));
            found.put(type.name(), List.of(p.receive(consumer, 1), p.nothing(consumer)));
        }
        return found;
    }

    public static Object negativelyAcknowledgedWithBackoff(Program p) throws Exception {
        String topic = p.topic();
        Consumer<byte[]> consumer = p.consuming(topic).subscriptionType(SubscriptionType.Shared)
                .negativeAckRedeliveryBackoff(MultiplierRedeliveryBackoff.builder()
                        .minDelayMs(200).maxDelayMs(800).multiplier(2).build())
                .subscribe();
        p.send(p.producer(topic), "a");
        List<Object> found = new ArrayList<>();
        long[] least = {0, 200, 400, 800};
        long from = System.nanoTime();
        for (long delay : least) {
            Message<byte[]> message = p.next(consumer);
            long took = TimeUnit.NANOSECONDS.toMillis(System.nanoTime() - from);
            found.add(List.of(message.getRedeliveryCount(), took >= delay / 2));
            from = System.nanoTime();
            consumer.negativeAcknowledge(message);
        }
        found.add(p.receive(consumer, 1));
        return found;
    }

    public static Object aBatchIsNegativelyAcknowledged(Program p) throws Exception {
        String topic = p.topic();
        Consumer<byte[]> consumer = p.consuming(topic).subscriptionType(SubscriptionType.Shared)
                .enableBatchIndexAcknowledgment(true).negativeAckRedeliveryDelay(300, TimeUnit.MILLISECONDS).subscribe();
        p.sendAll(p.batching(topic), "a", "b", "c", "d", "e");
        List<Message<byte[]>> messages = p.next(consumer, 5);
        consumer.acknowledge(messages.get(1));
        for (int at : new int[] {0, 2, 3, 4}) {
            consumer.negativeAcknowledge(messages.get(at));
        }
        return Program.map("again", p.receive(consumer, 4), "then", p.nothing(consumer));
    }

    public static Object redeliveredOnRequest(Program p) throws Exception {
        Map<String, Object> found = new LinkedHashMap<>();
        for (SubscriptionType type : TYPES) {
            String topic = p.topic(type.name());
            Consumer<byte[]> consumer = p.consuming(topic).subscriptionType(type).subscribe();
            p.send(p.producer(topic), "a", "b", "c");
            consumer.acknowledge(p.next(consumer, 3).get(0));
            p.until("one is acknowledged", () -> p.backlog(topic) == 2);
            consumer.redeliverUnacknowledgedMessages();
            List<Object> got = p.receive(consumer, 2);
            got.sort((one, two) -> String.valueOf(one).compareTo(String.valueOf(two)));
            found.put(type.name(), got);
        }
        return found;
    }

    public static Object redeliveredAfterATimeout(Program p) throws Exception {
        String topic = p.topic();
        Consumer<byte[]> consumer = p.consuming(topic).subscriptionType(SubscriptionType.Shared)
                .ackTimeout(1, TimeUnit.SECONDS).subscribe();
        p.send(p.producer(topic), "a", "b");
        List<Message<byte[]>> messages = p.next(consumer, 2);
        consumer.acknowledge(messages.get(1));
        Object once = p.seen(p.next(consumer));
        return Program.map("once", once, "twice", p.receive(consumer, 1), "then", p.nothing(consumer));
    }

    private static DeadLetterPolicy.DeadLetterPolicyBuilder policy(int count) {
        return DeadLetterPolicy.builder().maxRedeliverCount(count);
    }

    /** Letters without ids of messages, which are of one run. */
    private static List<Object> letters(Program p, Consumer<byte[]> consumer, int count) throws Exception {
        List<Object> found = new ArrayList<>();
        for (Message<byte[]> message : p.next(consumer, count)) {
            Map<String, String> properties = new TreeMap<>();
            message.getProperties().forEach((name, value) ->
                    properties.put(name, name.contains("ID") ? "an id" : p.shown(value)));
            found.add(Program.map("data", Program.text(message.getData()), "properties", properties,
                    "key", String.valueOf(message.getKey())));
            consumer.acknowledge(message);
        }
        return found;
    }

    public static Object deadLetters(Program p) throws Exception {
        String topic = p.topic();
        Consumer<byte[]> letters = p.consumer(topic + "-s-DLQ");
        Consumer<byte[]> consumer = p.consuming(topic).subscriptionType(SubscriptionType.Shared)
                .negativeAckRedeliveryDelay(100, TimeUnit.MILLISECONDS).deadLetterPolicy(policy(2).build()).subscribe();
        p.producer(topic).newMessage().value(Program.bytes("bad")).key("k").property("x", "1").send();
        List<Integer> tried = new ArrayList<>();
        for (int at = 0; at < 3; at++) {
            Message<byte[]> message = p.next(consumer);
            tried.add(message.getRedeliveryCount());
            consumer.negativeAcknowledge(message);
        }
        Object found = letters(p, letters, 1);
        p.send(p.producer(topic), "good");
        List<Object> good = p.receive(consumer, 1);
        return Program.map("tried", tried, "letters", found, "good", good,
                "none is left", p.until("none is left", () -> p.backlog(topic) == 0));
    }

    public static Object deadLettersElsewhere(Program p) throws Exception {
        String topic = p.topic();
        String elsewhere = p.topic("bin");
        Consumer<byte[]> consumer = p.consuming(topic).subscriptionType(SubscriptionType.Key_Shared)
                .negativeAckRedeliveryDelay(100, TimeUnit.MILLISECONDS)
                .deadLetterPolicy(policy(1).deadLetterTopic(elsewhere).initialSubscriptionName("initial").build())
                .subscribe();
        p.producer(topic).newMessage().key("k").value(Program.bytes("a")).send();
        for (int at = 0; at < 2; at++) {
            consumer.negativeAcknowledge(p.next(consumer));
        }
        Object subscriptions = p.until("the topic has a subscription", () -> {
            try {
                List<String> names = new ArrayList<>();
                p.stats(elsewhere).get("subscriptions").fieldNames().forEachRemaining(names::add);
                return names.isEmpty() ? null : names;
            } catch (IllegalStateException error) {
                return null;
            }
        });
        Consumer<byte[]> letters = p.client().newConsumer().topic(elsewhere).subscriptionName("initial").subscribe();
        return Program.map("subscriptions", subscriptions, "letters", letters(p, letters, 1));
    }

    public static Object retryLetters(Program p) throws Exception {
        String topic = p.topic();
        Consumer<byte[]> letters = p.consumer(topic + "-s-DLQ");
        Consumer<byte[]> consumer = p.consuming(topic).subscriptionType(SubscriptionType.Shared).enableRetry(true)
                .deadLetterPolicy(policy(2).build()).subscribe();
        p.producer(topic).newMessage().value(Program.bytes("a")).property("x", "1").send();
        List<Object> tried = new ArrayList<>();
        for (int at = 0; at < 3; at++) {
            Message<byte[]> message = p.next(consumer);
            Map<String, String> properties = new TreeMap<>(message.getProperties());
            properties.replaceAll((name, value) -> name.contains("ID") ? "an id" : p.shown(value));
            tried.add(Program.map("topic", p.shown(message.getTopicName()), "properties", properties));
            consumer.reconsumeLater(message, Map.of("more", "2"), 100, TimeUnit.MILLISECONDS);
        }
        return Program.map("tried", tried, "letters", letters(p, letters, 1));
    }

    public static Object seekToAMessage(Program p) throws Exception {
        Map<String, Object> found = new LinkedHashMap<>();
        for (boolean inclusive : new boolean[] {false, true}) {
            String topic = p.topic(String.valueOf(inclusive));
            ConsumerBuilder<byte[]> settings = p.consuming(topic);
            Consumer<byte[]> consumer = (inclusive ? settings.startMessageIdInclusive() : settings).subscribe();
            p.send(p.producer(topic), "a", "b", "c", "d", "e", "f");
            List<Message<byte[]>> messages = p.next(consumer, 6);
            consumer.acknowledgeCumulative(messages.get(5));
            consumer.seek(messages.get(2).getMessageId());
            found.put("inclusive " + inclusive, List.of(p.receive(consumer, inclusive ? 4 : 3), p.nothing(consumer)));
        }
        return found;
    }

    public static Object seekIntoABatch(Program p) throws Exception {
        Map<String, Object> found = new LinkedHashMap<>();
        for (boolean inclusive : new boolean[] {false, true}) {
            String topic = p.topic(String.valueOf(inclusive));
            ConsumerBuilder<byte[]> settings = p.consuming(topic).enableBatchIndexAcknowledgment(true);
            Consumer<byte[]> consumer = (inclusive ? settings.startMessageIdInclusive() : settings).subscribe();
            Producer<byte[]> producer = p.batching(topic);
            p.sendAll(producer, "a", "b", "c", "d");
            p.sendAll(producer, "e", "f");
            List<Message<byte[]>> messages = p.next(consumer, 6);
            consumer.acknowledgeCumulative(messages.get(5));
            consumer.seek(messages.get(1).getMessageId());
            found.put("inclusive " + inclusive, List.of(p.receive(consumer, inclusive ? 5 : 4), p.nothing(consumer)));
        }
        return found;
    }

    public static Object seekToATime(Program p) throws Exception {
        String topic = p.topic();
        Consumer<byte[]> consumer = p.consumer(topic);
        Producer<byte[]> producer = p.producer(topic);
        p.send(producer, "a", "b", "c");
        Thread.sleep(100);
        p.send(producer, "d");
        long at = p.next(consumer, 4).get(3).getPublishTime();
        consumer.seek(at);
        List<Object> one = p.receive(consumer, 1);
        Object then = p.nothing(consumer);
        consumer.seek(0);
        List<Object> all = p.receive(consumer, 4);
        consumer.seek(at + 3_600_000);
        p.send(producer, "e");
        return Program.map("d", one, "then", then, "all", all, "in an hour", p.receive(consumer, 1));
    }

    public static Object seekByAFunction(Program p) throws Exception {
        String topic = p.partitioned(2);
        Producer<byte[]> producer = p.producing(topic).messageRouter(new org.apache.pulsar.client.api.MessageRouter() {
            @Override
            public int choosePartition(Message<?> message, org.apache.pulsar.client.api.TopicMetadata metadata) {
                return Integer.parseInt(message.getProperty("to"));
            }
        }).create();
        List<MessageId> second = new ArrayList<>();
        for (String text : List.of("a", "b", "c")) {
            producer.newMessage().value(Program.bytes(text + 0)).property("to", "0").send();
            second.add(producer.newMessage().value(Program.bytes(text + 1)).property("to", "1").send());
        }
        Consumer<byte[]> consumer = p.consumer(topic);
        p.texts(consumer, 6);
        consumer.seek(partition -> partition.endsWith("0") ? MessageId.earliest : second.get(1));
        List<String> got = p.texts(consumer, 4);
        got.sort(null);
        return Program.map("got", got, "then", p.nothing(consumer));
    }

    public static Object seekOfAConsumerThatIsClosed(Program p) throws Exception {
        Consumer<byte[]> consumer = p.consumer(p.topic());
        consumer.close();
        return p.fails(() -> {
            consumer.seek(MessageId.earliest);
            return null;
        });
    }
}
