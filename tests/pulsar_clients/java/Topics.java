import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.MessageListener;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.Reader;

/** Topics that end, move, are not there, and are not stored; connections. */
final class Topics {

    public static Object aTopicThatEnds(Program p) throws Exception {
        String topic = p.topic();
        Consumer<byte[]> consumer = p.consumer(topic);
        Producer<byte[]> producer = p.producer(topic);
        p.send(producer, "a", "b");
        boolean before = consumer.hasReachedEndOfTopic();
        p.admin("POST", Program.path(topic) + "/terminate", "");
        List<Object> got = p.receive(consumer, 2);
        p.until("the consumer is informed", consumer::hasReachedEndOfTopic);
        CountDownLatch informed = new CountDownLatch(1);
        p.consuming(topic).subscriptionName("l").messageListener(new MessageListener<byte[]>() {
            @Override
            public void received(Consumer<byte[]> of, Message<byte[]> message) {
                of.acknowledgeAsync(message);
            }

            @Override
            public void reachedEndOfTopic(Consumer<byte[]> of) {
                informed.countDown();
            }
        }).subscribe();
        Reader<byte[]> reader = p.reading(topic).create();
        return Program.map("before", before, "got", got, "a listener is informed", informed.await(Program.WAIT_S, TimeUnit.SECONDS),
                "sending", p.fails(() -> producer.send(Program.bytes("c"))), "a producer", p.fails(() -> p.producer(topic)),
                "read", p.read(reader), "end of the reader", p.until("the reader is informed", reader::hasReachedEndOfTopic));
    }

    public static Object aTopicIsUnloaded(Program p) throws Exception {
        String topic = p.topic();
        Consumer<byte[]> consumer = p.consumer(topic);
        Producer<byte[]> producer = p.producing(topic).enableBatching(true).create();
        List<CompletableFuture<MessageId>> sent = new ArrayList<>();
        for (int at = 0; at < 300; at++) {
            sent.add(producer.sendAsync(Program.bytes(String.format("%03d", at))));
            if (at % 100 == 50) {
                p.admin("PUT", Program.path(topic) + "/unload", "");
            }
        }
        p.answered(producer, sent);
        List<String> found = new ArrayList<>();
        while (found.isEmpty() || !found.get(found.size() - 1).equals("299")) {
            String text = p.texts(consumer, 1).get(0);
            if (!found.contains(text)) {
                found.add(text);
            }
        }
        return Program.map("all in order", found.equals(List.of(Program.numbered("", 300))), "connected", producer.isConnected());
    }

    public static Object aTopicIsUnloadedWithUnacknowledgedMessages(Program p) throws Exception {
        String topic = p.topic();
        Consumer<byte[]> consumer = p.shared(topic);
        p.send(p.producer(topic), "a", "b", "c");
        consumer.acknowledge(p.next(consumer, 3).get(1));
        p.until("one is acknowledged", () -> p.backlog(topic) == 2);
        p.admin("PUT", Program.path(topic) + "/unload", "");
        return p.texts(consumer, 2);
    }

    public static Object messagesThatAreNotStored(Program p) throws Exception {
        String topic = p.topic().replace("persistent://", "non-persistent://");
        Producer<byte[]> producer = p.producer(topic);
        p.send(producer, "lost");
        Consumer<byte[]> one = p.consumer(topic);
        Consumer<byte[]> two = p.client().newConsumer().topic(topic).subscriptionName("t").subscribe();
        p.send(producer, "a", "b");
        return List.of(p.texts(one, 2), p.texts(two, 2), p.nothing(one));
    }

    public static Object namesThatAreNone(Program p) throws Exception {
        List<Object> found = new ArrayList<>();
        for (String name : List.of("persistent://public/default/", "persistent://public/nowhere/t", "persistent://nobody/default/t",
                "other://public/default/t", p.topic() + "-partition-0")) {
            found.add(List.of(p.shown(name), p.fails(() -> p.producer(name)), p.fails(() -> p.consumer(name))));
        }
        return found;
    }

    public static Object topicsAreNotMadeHere(Program p) throws Exception {
        String topic = "persistent://" + p.namespace("autoTopicCreation", "{\"allowAutoTopicCreation\": false}") + "/t";
        return List.of(p.fails(() -> p.producer(topic)), p.fails(() -> p.consumer(topic)),
                p.fails(() -> p.reading(topic).create()));
    }

    public static Object severalConnections(Program p) throws Exception {
        String topic = p.partitioned(4);
        PulsarClient client = p.newClient(settings -> settings.connectionsPerBroker(4).keepAliveInterval(1, TimeUnit.SECONDS));
        Producer<byte[]> producer = client.newProducer().topic(topic).create();
        Consumer<byte[]> consumer = p.consuming(client, topic).subscribe();
        p.sendAll(producer, Program.numbered("", 40));
        List<String> got = p.texts(consumer, 40);
        Thread.sleep(2500); // two keep-alives
        p.sendAll(producer, "after a while");
        got.addAll(p.texts(consumer, 1));
        return List.of(got.size(), got.get(40));
    }

    public static Object aClientThatIsClosed(Program p) throws Exception {
        String topic = p.topic();
        Consumer<byte[]> other = p.consuming(topic).subscriptionName("other").subscribe();
        PulsarClient client = p.newClient();
        Producer<byte[]> producer = client.newProducer().topic(topic).create();
        Consumer<byte[]> consumer = p.consuming(client, topic).subscribe();
        producer.send(Program.bytes("a"));
        p.next(consumer);
        client.close();
        return Program.map("sending", p.fails(() -> producer.send(Program.bytes("b"))),
                "a producer", p.fails(() -> client.newProducer().topic(topic).create()),
                "again", p.texts(p.consumer(topic), 1), "other", p.texts(other, 1));
    }
}
