package main

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
	"github.com/apache/pulsar-client-go/pulsar/crypto"
)

// OneMessage has all that a message may have.
func (Scenarios) OneMessage(p *Program) any {
	topic := p.topic("t")
	sent := sure(p.producer(topic, nil).Send(context.Background(), &pulsar.ProducerMessage{
		Payload: []byte("a"), Key: "k", OrderingKey: "o", Properties: map[string]string{"x": "1", "y": ""},
		EventTime: time.UnixMilli(12345),
	}))
	return Seen{"sent": identified(sent, topic), "got": p.receive(p.consumer(topic, nil), 1)}
}

func (Scenarios) ManyMessagesInOrder(p *Program) any {
	topic := p.topic("t")
	producer := p.producer(topic, func(options *pulsar.ProducerOptions) {
		options.DisableBatching = false
		options.MaxPendingMessages = 10_000
	})
	sent := numbered("message ", 5000)
	p.sendAll(producer, texts(sent...)...)
	return slices.Equal(contents(p.consumer(topic, nil), 5000), sent)
}

func (Scenarios) Batches(p *Program) any {
	topic := p.topic("t")
	producer := p.producer(topic, batching)
	one := p.sendAll(producer, texts("a", "b", "c")...)
	two := p.sendAll(producer, texts("d")...)
	three := p.send(p.producer(topic, nil), "", "e")
	return Seen{
		"sent": []any{one, two, three}, "got": p.receive(p.consumer(topic, nil), 6), "last": producer.LastSequenceID(),
	}
}

func (Scenarios) BatchesByKey(p *Program) any {
	topic := p.topic("t")
	producer := p.producer(topic, func(options *pulsar.ProducerOptions) {
		batching(options)
		options.BatcherBuilderType = pulsar.KeyBasedBatchBuilder
	})
	var messages []*pulsar.ProducerMessage
	for _, content := range []string{"a1", "b1", "a2", "b2", "a3"} {
		messages = append(messages, keyed(content[:1], content))
	}
	p.sendAll(producer, messages...)
	got := map[string][]any{}
	for _, message := range next(p.consumer(topic, nil), 5) {
		got[message.Key()] = append(got[message.Key()], shown(message.Payload()), message.ID().BatchIdx())
	}
	return got
}

func (Scenarios) Compressed(p *Program) any {
	found := Seen{}
	large := strings.Repeat("x", 20_000)
	for name, kind := range map[string]pulsar.CompressionType{
		"none": pulsar.NoCompression, "lz4": pulsar.LZ4, "zlib": pulsar.ZLib, "zstd": pulsar.ZSTD,
	} {
		topic := p.topic(name)
		p.sendAll(p.producer(topic, func(options *pulsar.ProducerOptions) {
			batching(options)
			options.CompressionType = kind
		}), texts("a", large, "b")...)
		p.send(p.producer(topic, func(options *pulsar.ProducerOptions) { options.CompressionType = kind }), large)
		found[name] = contents(p.consumer(topic, nil), 4)
	}
	return found
}

func (Scenarios) Chunks(p *Program) any {
	topic := p.topic("t")
	producer := p.producer(topic, func(options *pulsar.ProducerOptions) {
		options.EnableChunking = true
		options.ChunkMaxMessageSize = 1000
	})
	sent := p.send(producer, "small", strings.Repeat("y", 3500), strings.Repeat("z", 2000))
	consumer := p.consumer(topic, ofType(pulsar.Shared))
	got := p.receive(consumer, 3)
	until("none is left", func() bool { return p.backlog(topic) == 0 })
	return Seen{"sent": sent, "got": got}
}

func (Scenarios) ChunksOfTheLargestSize(p *Program) any {
	topic := p.topic("t")
	producer := p.producer(topic, func(options *pulsar.ProducerOptions) { options.EnableChunking = true })
	p.send(producer, strings.Repeat("y", 12_000_000))
	return contents(p.consumer(topic, nil), 1)
}

func (Scenarios) AMessageThatIsTooLarge(p *Program) any {
	producer := p.producer(p.topic("t"), nil)
	failed := fails(producer.Send(context.Background(), text(strings.Repeat("x", 5*1024*1024+1))))
	return Seen{"failed": failed, "then": p.send(producer, "a")}
}

func (Scenarios) Delayed(p *Program) any {
	topic := p.topic("t")
	consumer := p.consumer(topic, ofType(pulsar.Shared))
	producer := p.producer(topic, nil)
	began := time.Now()
	for _, message := range []*pulsar.ProducerMessage{
		{Payload: []byte("late"), DeliverAfter: 7 * time.Second},
		{Payload: []byte("soon"), DeliverAt: began.Add(2 * time.Second)},
		{Payload: []byte("now")},
	} {
		sure(producer.Send(context.Background(), message))
	}
	first, soon := contents(consumer, 1), contents(consumer, 1)
	early := time.Since(began) < 1900*time.Millisecond
	late := contents(consumer, 1)
	return Seen{"got": [][]string{first, soon, late}, "early": early || time.Since(began) < 6900*time.Millisecond}
}

func (p *Program) deduplicated() string {
	return "persistent://" + p.namespace("deduplication", "true") + "/t"
}

func named(name string) func(*pulsar.ProducerOptions) {
	return func(options *pulsar.ProducerOptions) { options.Name = name }
}

func numberedMessages(ids ...int64) []*pulsar.ProducerMessage {
	var found []*pulsar.ProducerMessage
	for _, id := range ids {
		found = append(found, &pulsar.ProducerMessage{SequenceID: &id, Payload: []byte(fmt.Sprint(id))})
	}
	return found
}

func (Scenarios) DuplicatesAreDropped(p *Program) any {
	topic := p.deduplicated()
	producer := p.producer(topic, named("anna"))
	sent := []any{producer.LastSequenceID()}
	for _, message := range numberedMessages(10, 12, 11, 12, 20) {
		sent = append(sent, p.sendAll(producer, message)...)
	}
	producer.Close()
	again := p.producer(topic, named("anna"))
	sent = append(sent, again.LastSequenceID())
	sent = append(sent, p.sendAll(again, numberedMessages(20)...)...)
	sent = append(sent, p.sendAll(again, text("next"))...)
	consumer := p.consumer(topic, nil)
	got := p.receive(consumer, 4)
	return Seen{"sent": sent, "got": got, "then": p.nothing(consumer)}
}

func (Scenarios) DuplicatesAmongBatches(p *Program) any {
	topic := p.deduplicated()
	producer := p.producer(topic, func(options *pulsar.ProducerOptions) {
		batching(options)
		options.Name = "anna"
	})
	var sent []any
	for _, ids := range [][]int64{{1, 2, 3}, {2, 3}, {4, 5}} {
		sent = append(sent, p.sendAll(producer, numberedMessages(ids...)...))
	}
	return Seen{"sent": sent, "last": producer.LastSequenceID()}
}

func (Scenarios) AProducerNameThatIsTaken(p *Program) any {
	topic := p.topic("t")
	first := p.producer(topic, named("anna"))
	other := fails(p.produce(p.newClient(), topic, named("anna")))
	first.Close()
	return []string{other, fails(p.produce(p.client(), topic, named("anna")))}
}

func access(mode pulsar.ProducerAccessMode) func(*pulsar.ProducerOptions) {
	return func(options *pulsar.ProducerOptions) { options.ProducerAccessMode = mode }
}

func (Scenarios) ExclusiveAndASecond(p *Program) any {
	topic := p.topic("t")
	first := p.producer(topic, access(pulsar.ProducerAccessModeExclusive))
	exclusive := fails(p.produce(p.client(), topic, access(pulsar.ProducerAccessModeExclusive)))
	shared := fails(p.produce(p.client(), topic, nil))
	first.Close()
	p.producer(topic, nil)
	beside := fails(p.produce(p.client(), topic, access(pulsar.ProducerAccessModeExclusive)))
	return Seen{"exclusive": exclusive, "shared": shared, "beside a shared one": beside}
}

func (Scenarios) WaitingToBeExclusive(p *Program) any {
	topic := p.topic("t")
	first := p.producer(topic, access(pulsar.ProducerAccessModeExclusive))
	second := make(chan pulsar.Producer, 1)
	go func() { second <- p.producer(topic, access(pulsar.ProducerAccessModeWaitForExclusive)) }()
	time.Sleep(nothing)
	early := len(second) > 0
	p.send(first, "a")
	first.Close()
	select {
	case producer := <-second:
		p.send(producer, "b")
	case <-time.After(wait):
		panic("it is not the exclusive one")
	}
	return Seen{"early": early, "got": contents(p.consumer(topic, nil), 2)}
}

func (Scenarios) KeysChoosePartitions(p *Program) any {
	topic := p.partitioned(5)
	found := Seen{}
	for name, scheme := range map[string]pulsar.HashingScheme{"java": pulsar.JavaStringHash, "murmur": pulsar.Murmur3_32Hash} {
		producer := p.producer(topic, func(options *pulsar.ProducerOptions) { options.HashingScheme = scheme })
		var to []int32
		for at := range 20 {
			to = append(to, sure(producer.Send(context.Background(), keyed(fmt.Sprint("key ", at), "a"))).PartitionIdx())
		}
		found[name] = to
	}
	found["got"] = len(contents(p.consumer(topic, nil), 40))
	return found
}

func (Scenarios) ARouterOfItsOwn(p *Program) any {
	topic := p.partitioned(3)
	producer := p.producer(topic, func(options *pulsar.ProducerOptions) {
		options.MessageRouter = func(message *pulsar.ProducerMessage, topic pulsar.TopicMetadata) int {
			return len(message.Payload) % int(topic.NumPartitions())
		}
	})
	sent := p.send(producer, "a", "bb", "ccc", "dddd")
	var names []string
	for _, name := range sure(p.client().TopicPartitions(topic)) {
		names = append(names, p.plain(name))
	}
	return Seen{"sent": sent, "partitions": names}
}

func (Scenarios) AProducerThatIsClosed(p *Program) any {
	producer := p.producer(p.topic("t"), nil)
	producer.Close()
	return fails(producer.Send(context.Background(), text("a")))
}

func (Scenarios) Encrypted(p *Program) any {
	folder := sure(os.MkdirTemp("", "keys"))
	defer os.RemoveAll(folder)
	key := sure(rsa.GenerateKey(rand.Reader, 2048))
	private, public := filepath.Join(folder, "private"), filepath.Join(folder, "public")
	write := func(name, kind string, content []byte) {
		must(os.WriteFile(name, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: content}), 0o600))
	}
	write(private, "RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(key))
	write(public, "PUBLIC KEY", sure(x509.MarshalPKIXPublicKey(&key.PublicKey)))
	keys := crypto.NewFileKeyReader(public, private)
	topic := p.topic("t")
	encrypting := func(options *pulsar.ProducerOptions) {
		options.Encryption = &pulsar.ProducerEncryptionInfo{KeyReader: keys, Keys: []string{"client"}}
	}
	p.sendAll(p.producer(topic, encrypting), &pulsar.ProducerMessage{
		Payload: []byte("secret"), Key: "k", Properties: map[string]string{"x": "1"},
	})
	p.sendAll(p.producer(topic, func(options *pulsar.ProducerOptions) {
		encrypting(options)
		batching(options)
		options.CompressionType = pulsar.ZLib
	}), texts("a", "b")...)
	p.send(p.producer(topic, nil), "open")
	found := Seen{"with the key": p.receive(p.consumer(topic, func(options *pulsar.ConsumerOptions) {
		options.Decryption = &pulsar.MessageDecryptionInfo{KeyReader: keys}
	}), 4)}
	found["discarded"] = contents(p.consumer(topic, func(options *pulsar.ConsumerOptions) {
		options.SubscriptionName = "discard"
		options.Decryption = &pulsar.MessageDecryptionInfo{ConsumerCryptoFailureAction: crypto.ConsumerCryptoFailureActionDiscard}
	}), 1)
	return found
}

func (Scenarios) ATransactionIsRefused(p *Program) any {
	client, err := p.open(func(options *pulsar.ClientOptions) {
		options.EnableTransaction = true
		options.OperationTimeout = 2 * time.Second
	})
	if err != nil {
		return errorName(err)
	}
	return fails(client.NewTransaction(aMinute))
}
