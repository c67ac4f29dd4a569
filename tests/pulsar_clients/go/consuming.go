package main

import (
	"slices"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
)

func (Scenarios) AChannel(p *Program) any {
	topic := p.topic("t")
	consumer := p.consumer(topic, nil)
	p.send(p.producer(topic, nil), "a", "b", "c")
	var found []any
	for range 3 {
		select {
		case message := <-consumer.Chan():
			found = append(found, p.seen(message.Message))
			must(consumer.Ack(message))
		case <-time.After(wait):
			panic("no message came")
		}
	}
	return found
}

func (Scenarios) NoReceiverQueue(p *Program) any {
	topic := p.topic("t")
	consumer := p.consumer(topic, func(options *pulsar.ConsumerOptions) { options.EnableZeroQueueConsumer = true })
	p.send(p.producer(topic, nil), "a", "b", "c")
	return p.receive(consumer, 3)
}

func (Scenarios) AQueueThatIsSmallerThanABatch(p *Program) any {
	topic := p.topic("t")
	consumer := p.consumer(topic, func(options *pulsar.ConsumerOptions) { options.ReceiverQueueSize = 2 })
	producer := p.producer(topic, batching)
	p.sendAll(producer, texts(numbered("a", 10)...)...)
	p.sendAll(producer, texts(numbered("b", 10)...)...)
	return []any{contents(consumer, 20), p.nothing(consumer)}
}

func (Scenarios) SeveralTopics(p *Program) any {
	topics := []string{p.topic("one"), p.topic("two"), p.topic("three")}
	consumer := p.consumer("", func(options *pulsar.ConsumerOptions) { options.Topics = topics })
	for _, topic := range topics {
		p.send(p.producer(topic, nil), "a", "b")
	}
	var got []string
	for _, message := range next(consumer, 6) {
		got = append(got, p.plain(message.Topic())+" "+shown(message.Payload()))
		must(consumer.Ack(message))
	}
	for _, topic := range topics {
		until("none is left", func() bool { return p.backlog(topic) == 0 })
	}
	return sorted(got)
}

func (Scenarios) APatternLooksAgain(p *Program) any {
	p.send(p.producer(p.topic("in-one"), nil), "a")
	p.send(p.producer(p.topic("out"), nil), "no")
	consumer := p.consumer("", func(options *pulsar.ConsumerOptions) {
		options.TopicsPattern = p.topic("in-") + ".*"
		options.AutoDiscoveryPeriod = time.Second
	})
	first := contents(consumer, 1)
	p.send(p.producer(p.topic("in-two"), nil), "b")
	return []any{first, contents(consumer, 1), p.nothing(consumer)}
}

func (Scenarios) AllPartitions(p *Program) any {
	topic := p.partitioned(3)
	sent := numbered("", 30)
	p.send(p.producer(topic, nil), sent...)
	found := Seen{}
	for name, kind := range map[string]pulsar.SubscriptionType{
		"exclusive": pulsar.Exclusive, "shared": pulsar.Shared, "failover": pulsar.Failover, "key-shared": pulsar.KeyShared,
	} {
		consumer := p.consumer(topic, func(options *pulsar.ConsumerOptions) {
			options.Type = kind
			options.SubscriptionName = name
		})
		found[name] = slices.Equal(sorted(contents(consumer, 30)), sent)
	}
	return found
}

func (Scenarios) PartitionsAreAdded(p *Program) any {
	topic := p.partitioned(1)
	consumer := p.consumer(topic, func(options *pulsar.ConsumerOptions) { options.AutoDiscoveryPeriod = time.Second })
	producer := p.producer(topic, func(options *pulsar.ProducerOptions) {
		options.PartitionsAutoDiscoveryInterval = time.Second
		options.MessageRouter = func(_ *pulsar.ProducerMessage, topic pulsar.TopicMetadata) int {
			return int(topic.NumPartitions()) - 1
		}
	})
	p.admin("POST", path(topic)+"/partitions", "2")
	until("the producer knows", func() bool {
		return p.send(producer, "a")[0].Partition == 1
	})
	p.send(producer, "b")
	last := ""
	for last != "b" { // of the first partition some may come later
		last = contents(consumer, 1)[0]
	}
	return last
}

func (Scenarios) TheLastMessageIds(p *Program) any {
	topic := p.partitioned(2)
	consumer := p.consumer(topic, nil)
	p.sendAll(p.producer(topic+"-partition-0", batching), texts("a", "b", "c")...)
	p.send(p.producer(topic+"-partition-1", nil), "d", "e")
	found := Seen{}
	for _, id := range sure(consumer.GetLastMessageIDs()) {
		found[p.plain(id.Topic())] = identified(id, id.Topic()+" alone")
	}
	return found
}
