package main

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
)

// Closes a consumer that leaves a backlog, and shows what the next one gets.
func (p *Program) again(topic string, consumer pulsar.Consumer, left int) any {
	until(fmt.Sprint(left, " are left"), func() bool { return p.backlog(topic) == left })
	consumer.Close()
	following := p.consumer(topic, nil)
	return []any{payloads(next(following, left)), p.nothing(following)}
}

func (Scenarios) AcknowledgedOneByOne(p *Program) any {
	topic := p.topic("t")
	consumer := p.consumer(topic, nil)
	p.send(p.producer(topic, nil), "a", "b", "c", "d", "e", "f")
	messages := next(consumer, 6)
	for _, at := range []int{0, 2, 3} {
		must(consumer.AckID(messages[at].ID()))
	}
	return p.again(topic, consumer, 3)
}

func (Scenarios) AcknowledgedCumulatively(p *Program) any {
	topic := p.topic("t")
	consumer := p.consumer(topic, nil)
	p.send(p.producer(topic, nil), "a", "b", "c", "d", "e", "f")
	must(consumer.AckCumulative(next(consumer, 6)[3]))
	return p.again(topic, consumer, 2)
}

func (Scenarios) AcknowledgedWithAReceipt(p *Program) any {
	topic := p.topic("t")
	consumer := p.consumer(topic, func(options *pulsar.ConsumerOptions) { options.AckWithResponse = true })
	p.send(p.producer(topic, nil), "a", "b", "c")
	messages := next(consumer, 3)
	must(consumer.Ack(messages[1]))
	one := p.backlog(topic)
	must(consumer.AckCumulative(messages[2]))
	return []int{one, p.backlog(topic)}
}

func (Scenarios) AcknowledgedByBatchIndex(p *Program) any {
	topic := p.topic("t")
	settings := func(options *pulsar.ConsumerOptions) {
		options.Type = pulsar.Shared
		options.EnableBatchIndexAcknowledgment = true
		options.AckWithResponse = true
	}
	consumer := p.consumer(topic, settings)
	p.sendAll(p.producer(topic, batching), texts("a", "b", "c", "d", "e", "f")...)
	messages := next(consumer, 6)
	for _, at := range []int{0, 2, 5} {
		must(consumer.Ack(messages[at]))
	}
	consumer.Close()
	following := p.consumer(topic, settings)
	return []any{p.receive(following, 3), p.nothing(following)}
}

func (Scenarios) BatchesAreAcknowledgedAsAWhole(p *Program) any {
	topic := p.topic("t")
	consumer := p.consumer(topic, func(options *pulsar.ConsumerOptions) { options.AckWithResponse = true })
	producer := p.producer(topic, batching)
	p.sendAll(producer, texts("a", "b", "c", "d")...)
	p.sendAll(producer, texts("e", "f")...)
	messages := next(consumer, 6)
	for _, at := range []int{0, 1, 3, 4, 5} {
		must(consumer.Ack(messages[at]))
	}
	consumer.Close()
	following := p.consumer(topic, nil)
	return []any{p.receive(following, 4), p.nothing(following)}
}

func (Scenarios) NegativelyAcknowledged(p *Program) any {
	found := Seen{}
	for name, kind := range map[string]pulsar.SubscriptionType{
		"exclusive": pulsar.Exclusive, "shared": pulsar.Shared, "failover": pulsar.Failover, "key-shared": pulsar.KeyShared,
	} {
		topic := p.topic(name)
		consumer := p.consumer(topic, func(options *pulsar.ConsumerOptions) {
			options.Type = kind
			options.NackRedeliveryDelay = tenth
		})
		p.send(p.producer(topic, nil), "a", "b", "c", "d")
		messages := next(consumer, 4)
		for _, at := range []int{0, 1, 3} {
			must(consumer.Ack(messages[at]))
		}
		consumer.Nack(messages[2])
		found[name] = []any{p.receive(consumer, 1), p.nothing(consumer)}
	}
	return found
}

type backoff struct{}

func (backoff) Next(count uint32) time.Duration {
	return time.Duration(count+1) * 300 * time.Millisecond
}

func (Scenarios) NegativelyAcknowledgedWithBackoff(p *Program) any {
	topic := p.topic("t")
	consumer := p.consumer(topic, func(options *pulsar.ConsumerOptions) {
		options.Type = pulsar.Shared
		options.NackBackoffPolicy = backoff{}
	})
	p.send(p.producer(topic, nil), "a")
	var found []any
	for range 3 {
		message := next(consumer, 1)[0]
		found = append(found, message.RedeliveryCount())
		consumer.Nack(message)
	}
	return append(found, p.receive(consumer, 1)...)
}

// Letters without ids of messages, which are of one run.
func (p *Program) letters(consumer pulsar.Consumer, count int) any {
	var found []any
	for _, message := range next(consumer, count) {
		properties := map[string]string{}
		for name, value := range message.Properties() {
			if strings.Contains(name, "ID") {
				value = "an id"
			}
			properties[name] = p.plain(value)
		}
		found = append(found, []any{shown(message.Payload()), message.Key(), properties})
		must(consumer.Ack(message))
	}
	return found
}

func (Scenarios) DeadLetters(p *Program) any {
	topic := p.topic("t")
	bin := p.topic("bin")
	letters := p.consumer(bin, nil)
	consumer := p.consumer(topic, func(options *pulsar.ConsumerOptions) {
		options.Type = pulsar.Shared
		options.NackRedeliveryDelay = tenth
		options.DLQ = &pulsar.DLQPolicy{MaxDeliveries: 3, DeadLetterTopic: bin, InitialSubscriptionName: "initial"}
	})
	p.sendAll(p.producer(topic, nil), &pulsar.ProducerMessage{
		Payload: []byte("bad"), Key: "k", Properties: map[string]string{"x": "1"},
	})
	var tried []any
	for range 3 {
		message := next(consumer, 1)[0]
		tried = append(tried, message.RedeliveryCount())
		consumer.Nack(message)
	}
	found := p.letters(letters, 1)
	var subscriptions []string
	for name := range p.stats(bin, "subscriptions").(Seen) {
		subscriptions = append(subscriptions, name)
	}
	until("none is left", func() bool { return p.backlog(topic) == 0 })
	return Seen{"tried": tried, "letters": found, "subscriptions": sorted(subscriptions)}
}

func (Scenarios) RetryLetters(p *Program) any {
	topic := p.topic("t")
	letters := p.consumer(topic+"-s-DLQ", nil)
	consumer := p.consumer(topic, func(options *pulsar.ConsumerOptions) {
		options.Type = pulsar.Shared
		options.RetryEnable = true
		options.DLQ = &pulsar.DLQPolicy{MaxDeliveries: 2}
	})
	p.send(p.producer(topic, nil), "a")
	var tried []any
	for range 3 {
		message := next(consumer, 1)[0]
		properties := map[string]string{}
		for name, value := range message.Properties() {
			if strings.Contains(name, "ID") {
				value = "an id"
			}
			properties[name] = p.plain(value)
		}
		tried = append(tried, []any{p.plain(message.Topic()), properties})
		consumer.ReconsumeLater(message, tenth)
	}
	return Seen{"tried": tried, "letters": p.letters(letters, 1)}
}

func (Scenarios) SeekToAMessage(p *Program) any {
	found := Seen{}
	for _, inclusive := range []bool{false, true} {
		topic := p.topic(fmt.Sprint(inclusive))
		consumer := p.consumer(topic, func(options *pulsar.ConsumerOptions) { options.StartMessageIDInclusive = inclusive })
		p.send(p.producer(topic, nil), "a", "b", "c", "d", "e", "f")
		messages := next(consumer, 6)
		must(consumer.AckCumulative(messages[5]))
		must(consumer.Seek(messages[2].ID()))
		count := 3
		if inclusive {
			count = 4
		}
		found[fmt.Sprint("inclusive ", inclusive)] = []any{p.receive(consumer, count), p.nothing(consumer)}
	}
	return found
}

func (Scenarios) SeekIntoABatch(p *Program) any {
	topic := p.topic("t")
	consumer := p.consumer(topic, func(options *pulsar.ConsumerOptions) { options.StartMessageIDInclusive = true })
	producer := p.producer(topic, batching)
	p.sendAll(producer, texts("a", "b", "c", "d")...)
	p.sendAll(producer, texts("e", "f")...)
	messages := next(consumer, 6)
	must(consumer.AckCumulative(messages[5]))
	must(consumer.Seek(messages[1].ID()))
	got := contents(consumer, 5)
	return []any{slices.Contains(got, "f"), got}
}
